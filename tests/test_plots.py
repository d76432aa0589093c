"""Pictures: every plot renders, whatever a trace went through; spikes stay; nothing but PNG or 422."""

import io

import numpy as np
import pytest
from conftest import TinyStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from starlette.testclient import TestClient

from service.app import create_app
from service.options import Kind, PictureOptions
from service.plots import PLOTS
from service.settings import Settings
from service.style import THEMES, look

GROUPS = ("embed", "block0.attn", "block0.ffn", "head")


def rich_trace(steps: int, broken: bool) -> dict:
    """A trace with all optional columns, sampled every fourth step."""
    random = np.random.default_rng(steps)
    sampled = np.arange(steps) % 4 != 0
    norms = np.exp(random.standard_normal(steps))
    if broken:
        norms[steps // 2 :: 3] = np.inf
        norms[-1] = np.nan
    names = [
        "attn_logit_max",
        "val_loss",
        *(f"{kind}/{group}" for kind in ("grad_norm", "update_ratio") for group in GROUPS),
    ]
    columns = {name: np.ma.array(norms * random.uniform(0.5, 1, steps), mask=sampled) for name in names}
    return {"step": np.arange(1, steps + 1), "grad_norm": norms, "loss": norms, **columns}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = TinyStore(tmp_path_factory.mktemp("plots") / "runs")
    rich = {
        (arm, seed): rich_trace(300, broken=arm == 1 and seed == 0) for arm in range(2) for seed in range(2)
    }
    store.add_run("rich", arms=2, seeds=2, steps=300, traces=rich)
    store.add_run("plain", steps=40)
    store.add_run("empty", steps=0, status="running")
    store.add_run("one", steps=1, arms=1)
    nothing = {"step": np.arange(1, 6), "grad_norm": np.full(5, np.nan), "loss": np.full(5, np.inf)}
    store.add_run("broken", steps=5, arms=1, traces={(0, 0): nothing})
    with TestClient(create_app(Settings(storage=str(store.folder), log_level="error"))) as client:
        yield client


def pixels(answer) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB")).astype(int)


def near(picture: np.ndarray, color: str, distance: int = 60) -> np.ndarray:
    """Where a picture has (about) this colour."""
    target = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
    return np.abs(picture - target).sum(axis=-1) < distance


@pytest.mark.parametrize("run", ["rich", "plain", "empty", "one", "broken", "rich_00002"])
@pytest.mark.parametrize("plot", PLOTS)
def test_every_plot_renders_whatever_the_trace_went_through(client, plot, run):
    assert pixels(client.get(f"/runs/{run}/{plot}.png")).shape == (600, 1000, 3)


@pytest.mark.parametrize("plot", PLOTS)
def test_every_plot_is_also_a_drawing(client, plot):
    assert client.get(f"/runs/rich/{plot}.svg").content.startswith(b"<?xml")
    assert client.get(f"/runs/rich/{plot}.pdf").content.startswith(b"%PDF")


@pytest.mark.parametrize("kind", list(Kind))
def test_the_same_picture_is_the_same_bytes(client, kind):
    first = client.get(f"/runs/rich/gradnorm.{kind}").content
    client.app.state.context.pictures.put("x", b"", 10**12)  # nothing is kept
    client.app.state.context.pictures._entries.clear()
    assert client.get(f"/runs/rich/gradnorm.{kind}").content == first


def test_twenty_planted_spikes_are_visible(store, client_of):
    norms = np.random.default_rng(0).uniform(1, 2, 100_000)
    planted = np.linspace(2_500, 97_500, 20).astype(int)
    norms[planted - 1] = 9
    trace = {"step": np.arange(1, 100_001), "grad_norm": norms}
    store.add_run("long", steps=100_000, traces={(2, 0): trace})
    picture = pixels(client_of(store).get("/runs/long/gradnorm.png"))
    color, _ = look(THEMES["light"], 2)
    # The other arms stay under 7: half way between them and the peaks only the spikes are left.
    height = picture.shape[0]
    rows = near(picture[45 : int(height * 0.75)], color, 150).any(axis=1)  # below the title
    top = 45 + int(np.flatnonzero(rows)[0])
    columns = near(picture[top + 8 : top + 12], color, 150).any(axis=0)
    starts = np.flatnonzero(np.diff(np.concatenate(([0], columns.astype(int)))) == 1)
    assert len(starts) == 20
    expected = planted / 100_000
    places = (starts - starts[0]) / (starts[-1] - starts[0])
    assert np.allclose(places, (expected - expected[0]) / (expected[-1] - expected[0]), atol=0.003)


def test_a_metric_with_one_point_is_a_point(client):
    color, _ = look(THEMES["light"], 0)
    picture = pixels(client.get("/runs/one/gradnorm.png?legend=false"))
    assert near(picture, color).sum() > 20


def test_a_zoom_shows_only_its_range(client):
    whole = pixels(client.get("/runs/plain/gradnorm.png"))
    near_end = pixels(client.get("/runs/plain/gradnorm.png?from=30&to=40"))
    assert (whole != near_end).any()
    assert client.get("/runs/plain/gradnorm.png?from=900&to=1000").status_code == 200


def test_themes_have_their_background(client):
    for name, theme in THEMES.items():
        corner = pixels(client.get(f"/runs/plain/gradnorm.png?theme={name}"))[0, 0]
        assert corner.tolist() == [int(theme.background[k : k + 2], 16) for k in (1, 3, 5)]


def test_lines_differ_in_grey_print():
    def luminance(color: str) -> float:
        red, green, blue = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    for theme in THEMES.values():
        looks = [look(theme, index) for index in range(88)]
        assert len(set(looks)) == 88
        assert len({marker for _, marker in looks[:8]}) == 8
        first = sorted(luminance(color) for color, _ in looks[:4])
        assert min(np.diff(first)) > 0.03


def test_text_of_a_study_is_never_read_as_mathematics(store, client_of):
    store.add_run("r", arms=1, study="$\\frac{$ <b>_x^", arm="_a $\\alpha ^ {")
    client = client_of(store)
    assert client.get("/runs/r/gradnorm.png").status_code == 200
    assert client.get("/runs/r/loss.svg", params={"title": "$x_{"}).status_code == 200


def test_too_many_lines_are_refused_with_the_limit(store, client_of):
    store.add_run("wide", arms=60, steps=2)
    client = client_of(store)
    answer = client.get("/runs/wide/gradnorm.png")
    assert answer.status_code == 422
    assert "limit: 48" in answer.json()["detail"]
    assert client.get("/runs/wide/gradnorm.png?group_by=block").status_code == 200
    assert client.get("/runs/wide/gradnorm.png?trials=0,1,2").status_code == 200


@pytest.mark.parametrize(
    "query",
    ["width=5", "width=4000&height=4000", "ymin=3&ymax=2", "yscale=log&ymin=-1", "from=9&to=3", "band=sd",
     "theme=neon", "group_by=nonsense", "trials=nobody", "where=nonsense:1", "smooth=-1",
     "dpi=400&width=300"],
)  # fmt: skip
def test_a_bad_parameter_is_422_that_names_it(client, query):
    answer = client.get(f"/runs/plain/gradnorm.png?{query}")
    assert answer.status_code == 422
    words = {word.split("=")[0] for word in query.split("&")}
    assert words & {error["field"] for error in answer.json()["errors"]}


def test_arms_of_several_runs_stand_in_one_picture(client):
    answer = client.get("/compare/gradnorm.png?runs=plain,rich")
    assert pixels(answer).shape == (600, 1000, 3)
    assert client.get("/compare/gradnorm.png?runs=plain,nobody").status_code == 404
    assert client.get("/compare/gradnorm.png?runs=,").status_code == 422
    assert "immutable" in answer.headers["cache-control"]


PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "yscale": st.sampled_from(["linear", "log", "symlog"]),
        "band": st.sampled_from(["none", "minmax", "ci95"]),
        "x": st.sampled_from(["step", "tokens", "time"]),
        "theme": st.sampled_from(list(THEMES)),
        "smooth": st.integers(0, 400),
        "from": st.integers(0, 400),
        "to": st.integers(0, 400),
        "ymin": st.floats(-1e31, 1e31),
        "ymax": st.floats(-1e31, 1e31),
        "width": st.integers(150, 900),
        "height": st.integers(100, 700),
        "dpi": st.integers(30, 220),
        "clipped": st.booleans(),
        "legend": st.booleans(),
        "title": st.text(max_size=210),
        "group_by": st.sampled_from(["arm", "trial", "block", "seed", "lr", "nonsense"]),
        "trials": st.sampled_from(["0", "1,2", "9", ""]),
    },
)


@given(
    st.sampled_from(list(PLOTS)),
    st.sampled_from(["rich", "plain", "empty", "one", "broken", "rich_00002"]),
    PARAMETERS,
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_an_answer_is_a_picture_or_422(client, plot, run, query):
    answer = client.get(f"/runs/{run}/{plot}.png", params=query)
    assert answer.status_code in (200, 422), answer.text
    if answer.status_code == 200:
        size = Image.open(io.BytesIO(answer.content)).size
        assert size == (query.get("width", 1000), query.get("height", 600))


def test_options_know_their_limits():
    with pytest.raises(ValidationError):
        PictureOptions(width=10)

"""Curves over HTTP: the lines of pictures and traces, whatever the zoom, the grouping, the smoothing."""

import json

import numpy as np
import pytest


def steps_to(count):
    return {"step": np.arange(1, count + 1)}


def norms_of(store, run, number, count):
    """The recorded norms of a trial, from a source of their own: its part file."""
    from study.traces import read_trace

    return read_trace(store.storage, run, f"{run}_{number:05d}").numpy("grad_norm")[:count].astype(np.float64)


@pytest.fixture
def client(client_of, store):
    return client_of(store)


def ask(client, path="/runs/r/curves", **query):
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def values_at(line):
    return dict(zip(line["step"], line["value"], strict=True))


def test_a_single_trial_is_what_its_trace_is(store, client):
    store.add_run("r", arms=2, steps=3000)
    for query in ({}, {"from": 500, "to": 2500}):
        curve = ask(client, points=200, **query)["curves"][1]
        traces = client.get("/runs/r/traces", params={"metrics": "grad_norm", "points": 200, **query}).json()
        series = traces["trials"][1]["series"][0]
        assert (curve["step"], curve["value"]) == (series["step"], series["value"])


def test_seeds_are_averaged_at_equal_steps(store, client):
    store.add_run("r", arms=1, seeds=3, steps=50)
    every = np.stack([norms_of(store, "r", number, 50) for number in range(3)])
    curve = ask(client)["curves"][0]
    assert curve["seeds"] == [0, 1, 2]
    for line, expected in (
        (curve, every.mean(axis=0)), (curve["low"], every.min(axis=0)), (curve["high"], every.max(axis=0)),
    ):  # fmt: skip
        np.testing.assert_allclose(line["value"], expected, rtol=1e-12)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_zoom_changes_no_value(store, client, seeds):
    store.add_run("r", arms=1, seeds=seeds, steps=400)
    query = {"smooth": 30, "points": 5000}
    whole, part = (ask(client, **query, **zoom)["curves"][0] for zoom in ({}, {"from": 101, "to": 160}))
    assert part["step"] == list(range(101, 161))
    for line in ("smooth", "high", "low") if seeds > 1 else ("smooth",):
        assert values_at(part[line]).items() <= values_at(whole[line]).items()
    assert values_at(part).items() <= values_at(whole).items()


def test_zooming_brings_finer_points(store, client):
    store.add_run("r", arms=1, steps=5000)
    whole, part = (ask(client, points=100, **zoom) for zoom in ({}, {"from": 1000, "to": 1090}))
    assert whole["sampled"]
    assert not part["sampled"]
    assert part["curves"][0]["step"] == list(range(1000, 1091))


def test_planted_spikes_are_all_in_the_curve(store, client):
    norms = np.random.default_rng(0).uniform(1, 2, 100_000)
    planted = np.linspace(2_500, 97_500, 20).astype(int)
    norms[planted - 1] = 9
    store.add_run("r", arms=1, steps=100_000, traces={(0, 0): {**steps_to(100_000), "grad_norm": norms}})
    curve = ask(client)["curves"][0]
    assert [step for step, value in values_at(curve).items() if value == 9] == planted.tolist()
    assert len(curve["step"]) <= 1000


def test_a_diverged_seed_leaves_the_mean_with_its_name(store, client):
    norms = np.full(40, 5.0)
    norms[30:] = np.nan
    store.add_run("r", arms=1, seeds=2, steps=60, traces={(0, 1): {**steps_to(40), "grad_norm": norms}})
    curve = ask(client)["curves"][0]
    assert "diverged: seed 1 at step 31" in curve["label"]
    assert [(place["seed"], place["step"], place["value"]) for place in curve["diverged"]] == [(1, 31, 5.0)]
    alone = norms_of(store, "r", 0, 60)
    np.testing.assert_allclose([values_at(curve)[step] for step in (31, 60)], alone[[30, 59]])
    np.testing.assert_allclose(values_at(curve)[30], (alone[29] + 5) / 2)


def test_every_nonfinite_place_is_told(store, client):
    norms = np.ones(60)
    norms[[4, 5, 6]], norms[[7, 20]], norms[40] = np.nan, np.inf, -np.inf
    store.add_run("r", arms=1, status="running", traces={(0, 0): {**steps_to(60), "grad_norm": norms}})
    text = client.get("/runs/r/curves?points=8").text

    def refuse(constant):
        raise AssertionError(f"{constant} in JSON")

    answer = json.loads(text, parse_constant=refuse)
    curve = answer["curves"][0]
    assert [(gap["first"], gap["last"], gap["value"]) for gap in curve["nonfinite"]] == [
        (5, 7, "nan"), (8, 8, "inf"), (21, 21, "inf"), (41, 41, "-inf"),
    ]  # fmt: skip
    assert [step for step, value in values_at(curve).items() if value is None] == [5, 6, 7, 8, 21, 41]
    assert answer["first_nonfinite_step"] == 5


def test_smoothing_leaves_gaps_and_the_raw_line(store, client):
    norms = np.ones(60)
    norms[10] = np.nan
    store.add_run("r", arms=1, status="running", traces={(0, 0): {**steps_to(60), "grad_norm": norms}})
    curve = ask(client, smooth=10)["curves"][0]
    assert values_at(curve)[11] is None
    assert values_at(curve["smooth"])[11] is None
    assert values_at(curve["smooth"])[12] == pytest.approx(1.0)


def test_every_seed_can_have_its_line(store, client):
    store.add_run("r", arms=2, seeds=3)
    curves = ask(client, band="none")["curves"]
    assert [(curve["key"], curve["index"]) for curve in curves] == [("0", 0)] * 3 + [("1", 1)] * 3
    assert all(curve["high"] is None for curve in curves)


def test_lines_can_be_any_setting(store, client):
    store.add_run("r", arms=4)
    assert [curve["key"] for curve in ask(client, group_by="block")["curves"]] == [
        "block=pre",
        "block=deepnorm",
    ]
    assert len(ask(client, where="block:pre")["curves"]) == 3


def test_runs_side_by_side_have_keys_of_their_own(store, client):
    store.add_run("a", arms=2)
    store.add_run("b", arms=2)
    answer = ask(client, "/compare/curves", runs="a,b", metric="loss")
    assert [curve["key"] for curve in answer["curves"]] == ["a:0", "a:1", "b:0", "b:1"]
    assert [curve["run"] for curve in answer["curves"]] == ["a", "a", "b", "b"]


def test_a_trial_without_a_part_has_no_curve(store, client):
    store.add_run("r", arms=1, steps=0, status="running")
    answer = ask(client)
    assert (answer["curves"], answer["num_total"]) == ([], 0)
    assert "val_loss" in answer["metrics"]


def test_a_metric_sampled_once_is_a_point(store, client):
    sampled = np.ma.masked_all(60)
    sampled[29] = 4.0
    store.add_run("r", arms=1, traces={(0, 0): {**steps_to(60), "val_loss": sampled}})
    curve = ask(client, metric="val_loss")["curves"][0]
    assert (curve["step"], curve["value"]) == ([30], [4.0])


def test_tokens_and_time_are_what_a_step_is(store, client):
    store.add_run("r", arms=1, steps=60)
    scale = ask(client)["curves"][0]["scale"]
    assert scale["tokens"] == 8 * 48
    assert scale["time"] == pytest.approx(9 / 60)


@pytest.mark.parametrize(
    "query",
    [
        "metric=nonsense",
        "where=nonsense:1",
        "group_by=nonsense",
        "points=1",
        "from=9&to=3",
        "smooth=-1",
        "band=x",
    ],
)
def test_a_bad_parameter_is_422_that_names_it(store, client, query):
    store.add_run("r")
    answer = client.get(f"/runs/r/curves?{query}")
    assert answer.status_code == 422
    assert query.split("=", maxsplit=1)[0] in [error["field"] for error in answer.json()["errors"]]


def test_too_many_lines_are_422_with_the_limit(store, client):
    store.add_run("r", arms=49, steps=2)
    answer = client.get("/runs/r/curves")
    assert answer.status_code == 422
    assert "limit: 48" in answer.json()["detail"]


def test_an_unchanged_curve_is_304(store, client):
    store.add_run("r")
    first = client.get("/runs/r/curves")
    again = client.get("/runs/r/curves", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/runs/r/curves?smooth=5", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200

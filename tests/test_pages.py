"""Pages as the server renders them: what they say of a real store, also in its odd states."""

import gzip
import re
import time
import xml.dom.minidom
from html.parser import HTMLParser

import numpy as np
import plotly
import pytest

from service import assets
from service.plots import PLOTS

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """A page's elements, as (tag, attributes), and its text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.words, self.scripts = [], [], []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag, **attributes):
        return [had for name, had in self.elements if name == tag and attributes.items() <= had.items()]


@pytest.fixture
def client(client_of, store):
    return client_of(store)


@pytest.fixture
def open_page(client):
    def opened(path, status=200, **headers):
        answer = client.get(path, headers=headers, follow_redirects=False)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        return Page(answer.text)

    return opened


def test_an_empty_store_greets_with_the_command(client_at, tmp_path):
    text = Page(client_at(tmp_path / "nothing").get("/").text).text
    assert "python study/run.py" in text
    assert "make demo" in text


def test_a_migrated_store_without_a_run_greets_too(open_page):
    assert "python study/run.py" in open_page("/").text


def test_the_list_shows_how_far_runs_are(store, open_page):
    store.add_run("done")
    ids = store.add_run("going", arms=2, steps=30, status="running")
    store.change("going", trials={ids[0]: {"num_steps": 60}, ids[1]: {"num_steps": 60}})
    page = open_page("/")
    assert page.text.index("going") < page.text.index("done")
    going, done = page.all("progress")
    assert (going["value"], going["max"]) == ("60", "120")
    assert (done["value"], done["max"]) == ("4", "4")
    assert "2 running" in page.text
    assert page.all("img", src="/ui/runs/done/spark.svg")


def test_the_list_goes_on_by_pages(store, open_page):
    for number in range(60):
        store.add_run(f"r{number:02d}", steps=0, arms=1, created_at=1000.0 + number)
    first = open_page("/")
    second = open_page(first.all("a", rel="next")[0]["href"])
    runs = [link["href"] for page in (first, second) for link in page.all("a")]
    listed = [link.removeprefix("/ui/runs/") for link in runs if link.startswith("/ui/runs/")]
    assert listed == [f"r{number:02d}" for number in reversed(range(60))]
    assert not second.all("a", rel="next")


def test_the_list_filters_by_status_and_study(store, open_page):
    store.add_run("good", study="one")
    store.add_run("bad", study="two", status="failed")
    assert not open_page("/?status=failed&study=").all("a", href="/ui/runs/good")
    assert not open_page("/?status=&study=one").all("a", href="/ui/runs/bad")
    assert "No run matches" in open_page("/?study=three").text


def test_an_unknown_status_is_told_with_the_known_ones(store, open_page):
    page = open_page("/?status=nonsense", status=422)
    assert "nonsense" in page.text
    assert "interrupted" in page.text


def every_page(store):
    """The path of one page of each kind, over a run whose words are hostile."""
    ids = store.add_run(
        "r", seeds=2, arm=HOSTILE, notes=[HOSTILE], overrides={}, study=HOSTILE, error=HOSTILE
    )
    store.add_run("other")
    run = {"notes": [HOSTILE], "host": HOSTILE, "error": HOSTILE, "config": {"name": HOSTILE}}
    store.change(
        "r", run | {"data": [{"name": HOSTILE}]}, {ids[0]: {"config": {"model": {"norm": {"name": HOSTILE}}}}}
    )
    where = f"where=norm:{HOSTILE}&group_by={HOSTILE}&hide={HOSTILE}&metric={HOSTILE}"
    return [
        "/", f"/?study={HOSTILE}", f"/ui/runs/r?{where}", f"/ui/runs/{ids[0]}",
        f"/ui/compare?runs=r,other&{where}", "/ui/compare", f"/ui/runs/{HOSTILE.replace('/', '')}",
    ]  # fmt: skip


@pytest.mark.parametrize("place", range(7))
def test_no_page_runs_what_a_study_says(store, client, place):
    path = every_page(store)[place]
    answer = client.get(path)
    assert answer.status_code == (404 if "<" in path.partition("?")[0] else 200)
    page = Page(answer.text)
    assert HOSTILE not in answer.text
    assert not page.all("img", src="x")
    assert all(text.strip() == "" for text in page.scripts)
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "action"):
            assert not re.match(r"(https?:)?//|javascript:", attributes.get(name) or ""), (tag, attributes)
        if tag == "script":
            assert attributes["src"].startswith("/static/")
    assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_a_run_shows_its_trials_and_what_became_of_them(store, open_page):
    norms = np.ones(40)
    norms[30:] = np.nan
    ids = store.add_run("r", seeds=2, traces={(1, 0): {"step": np.arange(1, 41), "grad_norm": norms}})
    page = open_page("/ui/runs/r")
    assert [link["href"] for link in page.all("a") if link["href"].startswith("/ui/runs/r_")][::2][:8] == [
        f"/ui/runs/{trial}" for trial in ids
    ]
    assert "nonfinite_grad at 31" in page.text
    assert "7 finished, 1 diverged" in page.text


def test_latest_becomes_the_run_that_it_names_now(store, client):
    store.add_run("old", created_at=1000.0)
    store.add_run("new", created_at=2000.0)
    answer = client.get("/ui/runs/latest?metric=loss", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui/runs/new?metric=loss")
    assert answer.headers["cache-control"] == "no-store"


def test_every_plot_can_be_chosen(store, open_page):
    store.add_run("r", traces={(0, 0): {"step": np.arange(1, 61), "grad_norm/head": np.ones(60)}})
    options = open_page("/ui/runs/r").all("option")
    assert {option.get("data-plot") for option in options} >= set(PLOTS)
    assert "grad_norm/head" in [option.get("value") for option in options]


def test_the_picture_without_scripts_is_that_of_the_url(store, client, open_page):
    store.add_run("r", seeds=2)
    page = open_page("/ui/runs/r?metric=loss&smooth=9&where=block:pre&band=ci95&yscale=log&hide=1")
    source = next(image["src"] for image in page.all("img") if image.get("src", "").startswith("/runs/"))
    path, _, query = source.partition("?")
    assert path == "/runs/r/loss.png"
    assert set(query.split("&")) == {"band=ci95", "smooth=9", "yscale=log", "where=block%3Apre"}
    assert client.get(source).headers["content-type"] == "image/png"


def test_a_picture_of_too_many_arms_begins_with_the_calmest(store, client, open_page):
    ids = store.add_run("r", arms=50, steps=3)
    store.change("r", trials={trial: {"summary": {"final_loss": 9.0 - n}} for n, trial in enumerate(ids)})
    page = open_page("/ui/runs/r")
    chosen = page.all("input", name="trials")[0]["value"]
    assert sorted(chosen.split(",")) == ids[-12:]
    assert client.get(f"/runs/r/curves?trials={chosen}").status_code == 200


def test_trials_are_sorted_by_the_server_too(store, open_page):
    ids = store.add_run("r", arms=3)
    numbers = [0.3, None, 0.1]
    store.change("r", trials={t: {"summary": {"final_loss": n}} for t, n in zip(ids, numbers, strict=True)})
    rows = open_page("/ui/runs/r?sort=summary.final_loss").all("tr")
    assert [row["id"] for row in rows if row.get("id")] == ["trial-2", "trial-0", "trial-1"]
    assert "unknown field" in open_page("/ui/runs/r?sort=nonsense", status=422).text


def test_settings_that_differ_stand_apart_from_those_that_all_share(store, open_page):
    store.add_run("r", seeds=2)
    page = open_page("/ui/runs/r")
    differing, shared = page.text.split("settings that all share")
    heads = differing.rpartition("Settings")[2]
    assert "model.block" in heads
    assert "clip.max_norm" in heads
    assert "optimizer.lr" not in heads
    assert "optimizer.lr" in shared
    assert "seed " not in heads


def test_a_note_stands_once_with_its_arms(store, open_page):
    ids = store.add_run("r", seeds=3)
    store.change("r", trials={trial: {"notes": ["alpha does nothing here"]} for trial in ids[9:12]})
    text = open_page("/ui/runs/r").text.partition("Curves")[0]
    assert text.count("alpha does nothing here") == 1
    assert "(Pre-Norm | Attn. Relax | Gradient Clip=1)" in text


def test_the_reading_is_what_the_report_says(store, client, open_page):
    """Word for word: a page has no reading of its own."""
    ids = store.add_run(
        "r", seeds=2, summary={"start_grad_norm": 3.0, "peak_grad_norm": 9.0, "peak_step": 4.0}
    )
    report = client.get("/runs/r/report").json()
    text = open_page("/ui/runs/r").text
    sentences = [one["text"] for part in ("lines", "observations", "cannot_tell") for one in report[part]]
    assert len(sentences) > len(report["arms"])
    for sentence in sentences:
        assert " ".join(sentence.split()) in text
    assert "Reading" not in open_page(f"/ui/runs/{ids[0]}").text


def test_a_trial_shows_its_numbers_with_their_meaning(store, open_page):
    undefined = {"spike_score_loss": "needs 1,000 finite values, has 60"}
    numbers = {"peak_grad_norm": 12.5, "spike_score_loss": None, "from_tomorrow": 3, "undefined": undefined}
    trial = store.add_run("r", summary=numbers)[2]
    page = open_page(f"/ui/runs/{trial}")
    assert "12.5 highest finite norm of a single step" in page.text
    assert "needs 1,000 finite values" in page.text
    assert "from_tomorrow" in page.text
    assert page.all("a", rel="next")[0]["href"] == "/ui/runs/r_00003"
    assert page.all("section")[0]["data-base"] == f"/runs/{trial}"


def test_a_lost_run_says_how_to_go_on(store, open_page):
    long_ago = time.time() - 1000
    ids = store.add_run("r", status="running", heartbeat=long_ago)
    store.change("r", {"heartbeat": long_ago})
    assert "python study/run.py --resume r" in open_page("/ui/runs/r").text
    assert "No sign of life for 16 min" in open_page(f"/ui/runs/{ids[0]}").text


def test_a_run_in_its_first_second_has_a_page(store, open_page):
    ids = store.add_run("r", steps=0, status="pending")
    page = open_page("/ui/runs/r")
    assert "4 pending" in page.text
    assert page.all("div", id="head")[0]["data-events"] == "/runs/r/events"
    open_page(f"/ui/runs/{ids[0]}")
    store.add_run("none", arms=0, status="pending")
    assert "No trial has been planned yet" in open_page("/ui/runs/none").text


def test_a_deleted_folder_costs_the_curves_only(store, client, open_page):
    ids = store.add_run("r")
    store.storage.delete_folder("r")
    for path in ("/ui/runs/r", f"/ui/runs/{ids[0]}", "/ui/compare?runs=r"):
        open_page(path)
    assert "no part of its trace" in client.get("/runs/r/curves").json()["warnings"][0]
    assert client.get("/ui/runs/r/spark.svg").status_code == 200


def test_what_is_not_there_is_a_page_that_names_it(open_page):
    assert "nobody" in open_page("/ui/runs/nobody", status=404).text
    open_page("/ui/nothing/here", status=404)
    assert "nobody" in open_page("/ui/compare?runs=nobody", status=404).text


def test_the_api_keeps_its_problem_json(client):
    answer = client.get("/runs/nobody", headers={"Accept": "text/html"})
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_long_problem_is_a_page_too(store, open_page):
    store.add_run("r")  # its list of fields is long enough to be packed
    page = open_page("/ui/runs/r?sort=nonsense", status=422)
    assert "model.block" in page.text


def test_a_database_that_is_away_is_a_page_that_tries_again(store, open_page):
    store.catalogue.engine.dispose()
    (store.folder / "gradnorm.db").write_bytes(b"not a database" * 100)
    for path in ("/", "/ui/runs/r", "/ui/compare?runs=r"):
        page = open_page(path, status=503)
        assert "the database can't be read" in page.text
        assert page.all("meta", **{"http-equiv": "refresh"})


def test_a_newer_catalogue_is_a_page_that_says_so(store, open_page):
    import sqlalchemy as sa

    with store.catalogue.engine.begin() as connection:
        connection.execute(sa.text("update gradnorm_alembic_version set version_num = '9999'"))
    assert "schema 9999" in open_page("/", status=503).text


def test_a_comparison_is_whole_in_its_url(store, open_page):
    store.add_run("a")
    trial = store.add_run("b")[1]
    page = open_page(f"/ui/compare?runs=a&runs={trial}&metric=loss&smooth=5&band=none")
    section = page.all("section")[0]
    assert section["data-base"] == "/compare"
    assert section["data-fixed"] == f'{{"runs":"a,{trial}"}}'
    assert page.all("option", value="loss")[0].keys() >= {"selected"}
    assert page.all("input", name="smooth")[0]["value"] == "5"
    assert page.all("a", href=f"/ui/compare?runs={trial}")  # without the other


def test_a_comparison_shows_where_runs_differ(store, open_page):
    store.add_run("a", arms=1)
    ids = store.add_run("b", arms=1)
    config = store.catalogue.trial(ids[0])["config"]
    store.change("b", trials={ids[0]: {"config": config | {"precision": "bf16"}}})
    text = open_page("/ui/compare?runs=a,b").text
    heads = text.partition("Settings that differ")[2].partition("settings that all share")[0]
    assert "precision" in heads
    assert "bf16" in heads
    assert "clip.max_norm" not in heads


def test_a_comparison_has_its_limit(open_page):
    runs = ",".join(f"r{number}" for number in range(17))
    assert "limit: 1 to 16" in open_page(f"/ui/compare?runs={runs}", status=422).text
    assert "Choose the runs" in open_page("/ui/compare?runs=").text


def test_an_unchanged_page_is_304(store, client):
    store.add_run("r", created_at=1000.0)
    first = client.get("/ui/runs/r")
    again = client.get("/ui/runs/r", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "norms", [np.ones(60), np.zeros(60), np.full(60, np.nan), np.array([3.0]), np.geomspace(1, 1e30, 60)]
)
def test_a_sparkline_is_an_image_whatever_the_trace(store, client, norms):
    if len(norms) > 1:
        norms[20] = np.inf
    steps = np.arange(1, len(norms) + 1)
    store.add_run("r", traces={(0, 0): {"step": steps, "grad_norm": norms}})
    answer = client.get("/ui/runs/r/spark.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    xml.dom.minidom.parseString(answer.text)
    assert "nan" not in answer.text.lower()
    points = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", answer.text)
    assert all(0 <= float(x) <= 140 and 0 <= float(y) <= 30 for x, y in points)


def test_a_spike_is_in_the_sparkline(store, client):
    norms = np.ones(100_000)
    norms[70_000] = 50.0
    traces = {(0, 0): {"step": np.arange(1, 100_001), "grad_norm": norms}}
    store.add_run("r", arms=1, steps=100_000, traces=traces)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", client.get("/ui/runs/r/spark.svg").text)]
    assert sum(height < 5 for height in heights) == 1


def test_files_hold_for_ever_under_their_version(client):
    for name in assets.ASSETS:
        answer = client.get(assets.url_of(name))
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert client.get(f"/static/old/{name}").headers["cache-control"] == "private, no-cache"


def test_plotly_is_the_one_of_its_wheel(client):
    answer = client.get(assets.url_of("plotly.min.js"), headers={"Accept-Encoding": "gzip"})
    script = (assets.Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_bytes()
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == script
    assert len(gzip.compress(script, 1)) > int(answer.headers["content-length"])
    plain = client.get(assets.url_of("plotly.min.js"), headers={"Accept-Encoding": "identity"})
    assert plain.content == script


@pytest.mark.parametrize("name", ["nothing.js", "..%2f..%2fui.py", "%2e%2e%2fui.py", "base.html"])
def test_only_listed_files_are_served(client, name):
    assert client.get(f"/static/x/{name}").status_code == 404


def test_no_file_asks_another_host():
    for name, asset in assets.ASSETS.items():
        if name != "plotly.min.js":
            found = re.findall(r"https?://[^\s\"'`]+", asset.path.read_text())
            assert [one for one in found if one != "http://www.w3.org/2000/svg"] == [], name


def test_a_service_with_a_token_asks_a_browser_for_it(store, client_of):
    store.add_run("r")
    client = client_of(store, token="open sesame")
    refused = client.get("/ui/runs/r")
    page = Page(refused.text)
    assert refused.status_code == 401
    assert "r_0000" not in refused.text
    assert page.all("input", name="token", type="password")
    assert not page.all("script")
    assert not page.all("link", rel="stylesheet")  # which it could not have without the token
    wrong = client.get("/ui/runs/r?token=guess")
    assert wrong.status_code == 401
    assert "That was not it" in wrong.text
    assert client.get("/runs/r").headers["content-type"] == "application/problem+json"


def test_the_right_token_opens_all_that_a_page_needs(store, client_of):
    store.add_run("r")
    client = client_of(store, token="open sesame")
    answer = client.get("/ui/runs/r", params={"token": "open sesame"}, follow_redirects=True)
    assert answer.status_code == 200
    assert "token" not in str(answer.url)
    for path in ("/", "/runs/r/curves", "/runs/r/gradnorm.png", assets.url_of("style.css")):
        assert client.get(path).status_code == 200

"""The HTTP contract: runs, trials, traces; not found and refused."""

import json

import numpy as np
import pytest


@pytest.fixture
def client(store, client_of):
    return client_of(store)


def test_unknown_run_is_404(client):
    answer = client.get("/runs/nobody")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert "nobody" in answer.json()["detail"]


def test_runs_come_newest_first_in_pages(store, client):
    for number in range(5):
        store.add_run(f"r{number}", steps=0, arms=1, created_at=1000.0 + number)
    first = client.get("/runs?limit=3").json()
    second = client.get("/runs", params={"limit": 3, "cursor": first["next"]}).json()
    assert [run["id"] for run in first["runs"] + second["runs"]] == ["r4", "r3", "r2", "r1", "r0"]
    assert second["next"] is None
    assert client.get("/runs/latest").json()["id"] == "r4"


def test_a_trial_is_the_same_resource_narrower(store, client):
    trials = store.add_run("wide")
    assert client.get("/runs/wide").json()["kind"] == "run"
    answer = client.get(f"/runs/{trials[2]}").json()
    assert (answer["kind"], answer["id"], answer["arm_number"]) == ("trial", trials[2], 2)
    traces = client.get(f"/runs/{trials[2]}/traces").json()
    assert [trial["trial"] for trial in traces["trials"]] == [trials[2]]


def test_every_step_is_served_where_there_are_few(store, client):
    store.add_run("short", steps=60)
    answer = client.get("/runs/short/traces?metrics=grad_norm").json()
    series = answer["trials"][0]["series"][0]
    assert series["step"] == list(range(1, 61))
    assert (series["num_total"], series["num_returned"], series["sampled"]) == (60, 60, False)


def test_trace_of_a_diverged_trial_is_valid_json(store, client):
    norms = np.ones(50)
    norms[10], norms[20], norms[49] = np.inf, -np.inf, np.nan
    store.add_run("burst", arms=1, traces={(0, 0): {"step": np.arange(1, 51), "grad_norm": norms}})
    text = client.get("/runs/burst/traces?metrics=grad_norm&points=8").text

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    trial = json.loads(text, parse_constant=refuse)["trials"][0]
    places = [(place["step"], place["value"]) for place in trial["nonfinite"]]
    assert places == [(11, "inf"), (21, "-inf"), (50, "nan")]
    series = trial["series"][0]
    assert [step for step, value in zip(series["step"], series["value"], strict=True) if value is None] == [
        11,
        21,
        50,
    ]
    assert trial["first_nonfinite_step"] == 11


def test_planted_spikes_are_all_in_the_answer(store, client):
    norms = np.random.default_rng(0).uniform(1, 2, 100_000)
    planted = np.linspace(2_500, 97_500, 20).astype(int)
    norms[planted - 1] = 9
    store.add_run(
        "long", arms=1, traces={(0, 0): {"step": np.arange(1, 100_001), "grad_norm": norms}}, steps=100_000
    )
    series = client.get("/runs/long/traces?metrics=grad_norm").json()["trials"][0]["series"][0]
    found = [step for step, value in zip(series["step"], series["value"], strict=True) if value == 9]
    assert found == planted.tolist()
    assert series["num_returned"] <= 2000


@pytest.mark.parametrize(
    "query", ["metrics=nonsense", "where=nonsense:1", "trials=99", "points=1", "from=9&to=3"]
)
def test_a_bad_parameter_is_422_that_names_it(store, client, query):
    store.add_run("r")
    answer = client.get(f"/runs/r/traces?{query}")
    assert answer.status_code == 422
    assert query.split("=")[0] in [error["field"] for error in answer.json()["errors"]]


def test_where_takes_a_full_name_or_its_last_word(store, client):
    store.add_run("r")
    for where in ("block:deepnorm", "model.block:deepnorm"):
        trials = client.get("/runs/r/traces", params={"where": where}).json()["trials"]
        assert [trial["arm_number"] for trial in trials] == [2]
    both = client.get("/runs/r/traces?where=block:pre&where=clip.max_norm:1").json()["trials"]
    assert [trial["arm_number"] for trial in both] == [1, 3]


def test_a_torn_part_costs_only_itself(store, client):
    trials = store.add_run("torn")
    part = store.folder / "torn" / trials[0] / "trace" / "000000001.parquet"
    part.write_bytes(part.read_bytes()[:200])
    answer = client.get("/runs/torn/traces")
    assert answer.status_code == 200
    assert len(answer.json()["trials"][1]["series"][0]["step"]) == 60
    assert any("000000001.parquet" in warning for warning in answer.json()["warnings"])
    assert client.get("/runs/torn/gradnorm.png").status_code == 200


def test_a_misspelt_parameter_is_refused_with_its_neighbour(store, client):
    store.add_run("r")
    for path in ("/runs/r/traces?metric=loss", "/runs/r/loss.png?smoth=3", "/runs?limits=3", "/runs/r?x=1"):
        answer = client.get(path)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["field"] in path
    assert "did you mean 'metrics'" in client.get("/runs/r/traces?metric=loss").json()["detail"]


def test_a_report_is_json_or_markdown(store, client):
    store.add_run("r", seeds=2)
    assert client.get("/runs/r/report").json()["run"] == "r"
    answer = client.get("/runs/r/report?format=md")
    assert answer.headers["content-type"].startswith("text/markdown")
    assert client.get("/runs/r/report?format=pdf").status_code == 422

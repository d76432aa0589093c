"""Searches as real runs: killed and resumed, pruned, and diverged from the first value on."""

import io
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from driving import catalogue_of, run, start, wait_for
from optuna.trial import TrialState

from study.storage import Storage
from study.traces import read_trace

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STUDY = """
trial:
  model: {d_model: 16, num_layers: 2, num_heads: 2, context_length: 16}
  batch_size: 4
  steps: 30
flush_seconds: 0.2
"""


def write_search(folder: Path, **sections: Any) -> Path:
    path = folder / "search.yaml"
    path.write_text(STUDY + "".join(f"{name}: {json.dumps(value)}\n" for name, value in sections.items()))
    return path


def told(folder: Path, run_id: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=run_id, storage=f"sqlite:///{folder}/gradnorm.db").trials


def test_search_goes_on_after_its_driver_was_killed(tmp_path: Path) -> None:
    study = write_search(
        tmp_path,
        space={"optimizer.lr": {"loguniform": [1e-4, 1e-1]}, "model.relaxation": ["none", "softcap"]},
        search={
            "algorithm": "optuna", "num_samples": 6, "seeds": 2, "points_to_evaluate": [{"optimizer.lr": 0.01}]
        },
    )  # fmt: skip
    process = start(study, "--storage", tmp_path, "--run-id", "cut")
    catalogue = catalogue_of(tmp_path)

    def some_are_done() -> bool:
        rows = catalogue.trials("cut") if catalogue.is_there() else []
        return sum(row["status"] == "finished" for row in rows) >= 3

    wait_for(some_are_done, 240)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {one.number: one.values for one in told(tmp_path, "cut") if one.state == TrialState.COMPLETE}
    assert 1 <= len(before) < 6

    status, output = run("--resume", "cut", "--storage", tmp_path)
    assert status == 0, output
    rows = catalogue.trials("cut")
    assert [row["number"] for row in rows] == list(range(12))
    assert {row["status"] for row in rows} == {"finished"}
    assert [(row["arm_number"], row["seed"]) for row in rows] == [(n // 2, n % 2) for n in range(12)]
    trials = told(tmp_path, "cut")
    assert [one.state for one in trials] == [TrialState.COMPLETE] * 6
    assert {number: trials[number].values for number in before} == before
    assert [one.params["optimizer.lr"] for one in trials].count(0.01) == 1
    for one in trials:
        losses = [
            row["summary"]["final_loss"] for row in rows if row["arm_number"] == one.user_attrs["point"]
        ]
        assert one.values == pytest.approx([sum(losses) / 2])
    best = min(trials, key=lambda one: one.values[0])
    stored = catalogue.run("cut")
    assert stored is not None and stored["results"]["best"]["arm_number"] == best.user_attrs["point"]
    assert f"best: final_loss {best.values[0]:.4g}" in output
    assert_dashboard_opens(tmp_path)

    status, output = run("--resume", "cut", "--storage", tmp_path)
    assert status == 0 and "no trial left" in output
    assert len(told(tmp_path, "cut")) == 6


def assert_dashboard_opens(folder: Path) -> None:
    """Its own application, asked as its page asks."""
    import optuna_dashboard as dashboard

    application = dashboard.wsgi(optuna.storages.RDBStorage(f"sqlite:///{folder}/gradnorm.db"))
    answered: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET", "PATH_INFO": "/api/studies", "wsgi.input": io.BytesIO(),
        "SERVER_NAME": "localhost", "SERVER_PORT": "80", "wsgi.url_scheme": "http",
    }  # fmt: skip
    body = b"".join(application(environment, lambda status, headers, *_: answered.append(status)))
    assert answered == ["200 OK"]
    assert [one["study_name"] for one in json.loads(body)["study_summaries"]] == ["cut"]


def test_pruned_trial_is_told_so_and_stays_readable(tmp_path: Path) -> None:
    study = write_search(
        tmp_path,
        space={"optimizer.lr": {"loguniform": [1e-6, 1e-1]}},
        search={
            "algorithm": "optuna", "num_samples": 3, "scheduler": "asha", "max_concurrent": 1,
            "points_to_evaluate": [{"optimizer.lr": rate} for rate in (1e-2, 1e-6, 2e-6)],
        },
    )  # fmt: skip
    arguments = ("--set", "trial.steps=800", "--storage", tmp_path, "--run-id", "pruned")
    status, output = run(study, *arguments)
    assert status == 0, output
    rows = catalogue_of(tmp_path).trials("pruned")
    assert [row["status"] for row in rows] == ["finished", "pruned", "pruned"]
    states = [one.state for one in told(tmp_path, "pruned")]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
    for row in rows[1:]:
        trace = read_trace(Storage(tmp_path), "pruned", row["id"])
        steps = trace.numpy("step").tolist()
        assert not trace.unreadable
        assert 100 <= row["step"] <= len(steps) < 800 and steps == list(range(1, len(steps) + 1))
    stored = catalogue_of(tmp_path).run("pruned")
    assert stored is not None and stored["status"] == "finished"
    assert stored["notes"][0].startswith("scheduler asha was on")
    status, output = run("--resume", "pruned", "--storage", tmp_path)
    assert status == 0 and "no trial left" in output


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_run_in_which_every_trial_diverges_at_once_ends_as_it_should(scheduler: str, tmp_path: Path) -> None:
    study = write_search(
        tmp_path,
        space={"optimizer.lr": {"uniform": [1e30, 1e35]}},
        search={
            "algorithm": "optuna", "num_samples": 4, "scheduler": scheduler,
            "metrics": ["final_loss", "peak_grad_norm"],
        },
    )  # fmt: skip
    status, output = run(study, "--storage", tmp_path, "--run-id", "gone", "--set", "trial.steps=60")
    assert status == 0, output
    rows = catalogue_of(tmp_path).trials("gone")
    assert len(rows) == 4 and {row["status"] for row in rows} <= {"diverged", "pruned"}
    assert rows[0]["status"] == "diverged" and rows[0]["reason"] == "nonfinite_loss"
    for row, one in zip(rows, told(tmp_path, "gone"), strict=True):
        if row["status"] == "diverged":
            assert one.state == TrialState.COMPLETE
            assert one.values == [row["summary"]["initial_loss"], math.inf]
        else:
            assert one.state == TrialState.PRUNED
    stored = catalogue_of(tmp_path).run("gone")
    assert stored is not None and stored["status"] == "finished"
    assert stored["results"]["best"] is None and stored["results"]["pareto"] == []
    assert any(note.startswith("no arm has trials that all ended") for note in stored["notes"])

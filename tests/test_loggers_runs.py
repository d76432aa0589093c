"""Loggers in real runs: what they hold after a worker was killed, and in a run that one of them failed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import assert_exact, catalogue_of, run, start, wait_for, workers_of, write_study
from test_loggers import mlflow_runs, mlflow_spec, scalars

from study.storage import Storage
from study.traces import read_trace

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def write_logged(folder: Path, steps: int, loggers: list[Any]) -> Path:
    path = write_study(folder, steps)
    path.write_text(path.read_text() + f"loggers: {json.dumps(loggers)}\n")
    return path


def trace(folder: Path, trial_id: str) -> dict[str, np.ndarray]:
    return read_trace(Storage(folder), "logged", trial_id).columns()


def test_killed_worker_leaves_every_step_once_in_its_loggers(tmp_path: Path) -> None:
    study = write_logged(tmp_path, 1500, ["tensorboard", mlflow_spec(tmp_path)])
    process = start(study, "--storage", tmp_path, "--run-id", "logged")
    catalogue = catalogue_of(tmp_path)

    def checkpointed() -> bool:
        rows = catalogue.trials("logged") if catalogue.is_there() else []
        return any(row["step"] > 300 for row in rows) and bool(
            list(tmp_path.glob("logged/*/checkpoint/*.pt"))
        )

    wait_for(checkpointed, 240)
    for worker in workers_of(process.pid):
        worker.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    rows = catalogue.trials("logged")
    assert max(row["attempts"] for row in rows) > 1 and not any(row["notes"] for row in rows)
    assert_exact(tmp_path, "logged")
    client, runs = mlflow_runs(tmp_path)
    assert len(runs) == len(rows) == 2 and {one.info.status for one in runs} == {"FINISHED"}
    by_name = {one.info.run_name: one for one in runs}
    for row in rows:
        recorded = trace(tmp_path, row["id"])
        shown = scalars(tmp_path / "logged/tensorboard" / row["id"])
        for name in set(recorded) - {"step"}:
            expected = recorded[name].astype(np.float32)
            points = client.get_metric_history(by_name[row["id"]].info.run_id, name)
            assert [one.step for one in points] == [step for step, _ in shown[name]] == list(range(1, 1501))
            assert np.array([value for _, value in shown[name]], np.float32).tobytes() == expected.tobytes()
            logged = np.array([one.value for one in points])
            finite = np.isfinite(expected)
            assert (logged[finite].astype(np.float32) == expected[finite]).all(), name
        tags = by_name[row["id"]].data.tags
        assert tags["gradnorm.arm"] == row["arm"] and tags["gradnorm.status"] == "finished"


def test_server_that_is_away_is_in_the_trials_notes_and_nowhere_else(tmp_path: Path) -> None:
    away = {"name": "mlflow", "tracking_uri": "http://127.0.0.1:9"}  # discard: nothing listens there
    study = write_logged(tmp_path, 60, [away])
    status, output = run(
        study, "--storage", tmp_path, "--run-id", "logged", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
    )
    assert status == 0 and "warning: logger mlflow: MlflowException" in output, output
    for row in catalogue_of(tmp_path).trials("logged"):
        assert row["status"] == "finished" and row["step"] == 60
        assert len(row["notes"]) == 1
        assert row["notes"][0].startswith("logger mlflow gave up at step 0: MlflowException")

"""The command: real runs, real kills, and every mistake answered in one line."""

import os
import signal
from pathlib import Path

import pytest
from driving import assert_exact, catalogue_of, run, start, wait_for, workers_of, write_study
from starlette.testclient import TestClient
from typer.testing import CliRunner

from service.app import create_app
from service.settings import Settings
from study.run import app
from study.storage import Storage
from study.traces import read_trace


def checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob("*/*/checkpoint/*.pt"))


def numbers_come_back_from_the_traces(folder: Path) -> None:
    catalogue = catalogue_of(folder)
    before = {trial["id"]: trial["summary"] for trial in catalogue.trials("killed")}
    catalogue.save("killed", {}, changes={trial: {"summary": {"final_loss": 0.0}} for trial in before})
    status, output = in_process("--recompute", "latest", "--storage", folder)
    assert status == 0 and f"numbers of {len(before)} trials" in output
    assert {trial["id"]: trial["summary"] for trial in catalogue.trials("killed")} == before


@pytest.mark.ray
@pytest.mark.slow
def test_killed_worker_leaves_an_exact_trace(tmp_path: Path) -> None:
    """kill -9 of a trial's worker: Tune restarts it, and its trace is that of an undisturbed run."""
    process = start(write_study(tmp_path, steps=1500), "--storage", tmp_path, "--run-id", "killed")
    wait_for(lambda: checkpoints(tmp_path) and workers_of(process.pid))
    os.kill(workers_of(process.pid)[0].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert max(trial["attempts"] for trial in catalogue_of(tmp_path).trials("killed")) == 2
    assert_exact(tmp_path, "killed")
    numbers_come_back_from_the_traces(tmp_path)
    with TestClient(create_app(Settings(storage=str(tmp_path)))) as client:
        paths = ["/runs", "/runs/latest", "/runs/killed/report", "/runs/killed/gradnorm.png", "/"]
        paths += ["/runs/killed_00000/loss.svg", "/ui/runs/killed", "/ui/compare?runs=killed", "/healthz"]
        assert {path: client.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)


@pytest.mark.ray
@pytest.mark.slow
def test_interrupted_and_killed_runs_resume_exactly(tmp_path: Path) -> None:
    """Ctrl-C, then a resume whose driver is killed, then a resume to the end: exact, and read all along."""
    process = start(write_study(tmp_path, steps=2500), "--storage", tmp_path, "--run-id", "cut")
    wait_for(lambda: checkpoints(tmp_path))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "was interrupted" in output
    stored = catalogue_of(tmp_path).run("cut")
    assert stored is not None and stored["status"] == "interrupted"
    for trial in catalogue_of(tmp_path).trials("cut"):
        assert trial["status"] in ("pending", "finished")
        steps = read_trace(Storage(tmp_path), "cut", trial["id"]).numpy("step")
        assert steps.tolist() == list(range(1, len(steps) + 1))

    before = {path: path.stat().st_mtime for path in checkpoints(tmp_path)}
    process = start("--resume", "cut", "--storage", tmp_path)
    wait_for(lambda: any(path not in before for path in checkpoints(tmp_path)))
    status, output = run("--resume", "cut", "--storage", tmp_path)
    assert status == 2 and "is being driven on" in output
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    status, output = run("--resume", "cut", "--storage", tmp_path)
    assert status == 0, output
    assert_exact(tmp_path, "cut")


BAD_INPUT = {
    "a misspelt key": (["--set", "trial.step=60"], "unknown key 'step', did you mean 'steps'?"),
    "an unknown variant": (["--set", "trial.model.norm=rmss"], "unknown norm 'rmss', did you mean 'rms'?"),
    "a negative step count": (["--set", "trial.steps=-1"], "got -1"),
    "a missing corpus": (["--set", "trial.data.path=/nowhere"], "no corpus at '/nowhere'"),
    "a missing study": (["nowhere.yaml"], "no study file 'nowhere.yaml'"),
    "a run id that can't be one": (["--run-id", "A b"], "run id 'A b' must be"),
    "a run to resume that isn't there": (["--resume", "nowhere"], "no run 'nowhere'"),
}


def in_process(*arguments: object) -> tuple[int, str]:
    """Exit status and output of the command, without a process of its own: it refuses before Ray starts."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("mistake", BAD_INPUT)
def test_bad_input_is_one_line_and_nothing_is_made(mistake: str, tmp_path: Path) -> None:
    arguments, said = BAD_INPUT[mistake]
    storage = tmp_path / "runs"
    status, output = in_process(*arguments, "--storage", storage)
    assert status == 2
    assert said in output
    assert output.strip().count("\n") == 0, output
    assert not storage.exists()


def test_run_id_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    status, output = in_process("--storage", tmp_path, "--run-id", "taken")
    assert status == 2
    assert "run 'taken' exists already" in output
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "resources={gpu: 64}"], "fits on no node; the cluster has: cpu"),
        (["--storage", "/proc/nowhere"], "can't be written"),
    ],
    ids=["a trial that no node holds", "an unwritable storage"],
)
def test_what_only_the_cluster_or_the_storage_knows_is_one_line_too(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    storage = [] if "--storage" in arguments else ["--storage", tmp_path / "runs"]
    status, output = run(*arguments, *storage)
    assert status == 2
    assert said in output and output.strip().count("\n") == 0, output
    assert not list(tmp_path.iterdir())


def test_dry_run_lists_the_trials_and_makes_nothing(tmp_path: Path) -> None:
    status, output = in_process("figure", "--dry-run", "--storage", tmp_path / "runs")
    assert status == 0
    assert "4 trials" in output and "249,696" in output
    assert "pb_relax (alpha 32) equals none" in output.replace("\n", " ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_storage_that_fails_fails_one_trial_and_a_resume_completes_it(tmp_path: Path) -> None:
    """A trial whose folder can't be written any more fails with that reason; the others go on."""
    process = start(write_study(tmp_path, steps=1000), "--storage", tmp_path, "--run-id", "full")
    folder = tmp_path / "full" / "full_00000" / "trace"
    wait_for(lambda: list(folder.glob("*.parquet")))
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("no folder any more")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    first, second = catalogue_of(tmp_path).trials("full")
    assert (first["status"], second["status"]) == ("failed", "finished")
    assert "Error" in first["error"]

    folder.unlink()
    aside.rename(folder)
    status, output = run("--resume", "full", "--storage", tmp_path)
    assert status == 0, output
    assert_exact(tmp_path, "full")

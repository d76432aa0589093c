"""One trial on several workers, through Ray Train; and a worker that is told that its node goes away."""

import os
import signal
from pathlib import Path

import pytest
from driving import assert_exact, catalogue_of, start, wait_for, workers_of, write_study


@pytest.mark.ray
@pytest.mark.slow
def test_killed_rank_leaves_the_trace_of_an_undisturbed_group(tmp_path: Path) -> None:
    """kill -9 of one of two ranks: both start again from the checkpoint; one process records the same."""
    shared = ["--set", "trial.workers=2", "--storage", tmp_path]
    study = write_study(tmp_path, steps=1500)
    one_arm = ["--set", "arms=[{clip: zclip}]", "--set", "trial.optimizer.lr=1e-3"]
    process = start(study, *one_arm, *shared, "--run-id", "killed")
    checkpoints = tmp_path / "killed" / "killed_00000" / "checkpoint"
    wait_for(lambda: list(checkpoints.glob("*.pt")) or process.poll() is not None)
    ranks = workers_of(process.pid, "ray::RayTrainWorker")
    assert len(ranks) == 2, [one.cmdline() for one in workers_of(process.pid, "ray::")]
    os.kill(ranks[1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert_exact(tmp_path, "killed")


@pytest.mark.ray
@pytest.mark.slow
def test_worker_that_is_told_to_go_loses_no_step(tmp_path: Path) -> None:
    """SIGTERM, a preempted node's notice: flushed and saved at once, the trial goes on from there."""
    study = write_study(tmp_path, steps=3000)
    # No checkpoint and hardly a flush by the clock: what is there afterwards comes from the notice.
    clocks = ["--set", "checkpoint_seconds=1000", "--set", "flush_seconds=1000"]
    process = start(study, *clocks, "--storage", tmp_path, "--run-id", "told")
    wait_for(lambda: list(tmp_path.glob("told/*/trace/*.parquet")) and workers_of(process.pid))
    os.kill(workers_of(process.pid)[0].pid, signal.SIGTERM)
    wait_for(lambda: list(tmp_path.glob("told/*/checkpoint/*.pt")), seconds=30)
    (checkpoint,) = tmp_path.glob("told/*/checkpoint/*.pt")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert sorted(trial["attempts"] for trial in catalogue_of(tmp_path).trials("told")) == [1, 2]
    assert int(checkpoint.stem) > 1
    assert_exact(tmp_path, "told")

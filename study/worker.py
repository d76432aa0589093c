"""What runs on a worker: one trial, from its last checkpoint if it has one. Ray Tune calls it.

A worker writes the trace and the checkpoints, and tells Tune a few finite numbers at every flush.
It never talks to the database.
"""

import atexit
import json
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ray import tune

from models.variants import one_line

# Stands for a number that is not finite wherever Ray or Optuna would trip over it.
NOT_FINITE = 1e30
BACK_OFF_SECONDS = 30.0
GRACE_SECONDS = 25.0  # cloud providers kill half a minute after their notice


def run_trial(config: dict[str, Any]) -> None:
    """Train the trial in config["job"]: run_id, trial_id, trial (its config), paths to import from,
    storage, and clocks.

    What is raised here would be raised again by a restart, so it ends the trial as failed; restarts
    are for workers that die.
    """
    job = config["job"]
    _idle.clear()
    try:
        if job["trial"]["workers"] > 1:
            from study.group import train_group

            train_group(job)
        else:
            train_trial(job, tune.report, stop=_leaving.is_set)
    except Exception as error:  # noqa: BLE001 (any failure is this trial's, and its reason is told)
        _report(tune.report, 0, None, {"status": "failed", "error": one_line(error)})
    finally:
        _idle.set()


# SIGTERM, a preempted node's notice, ends a worker's main thread; the trial's thread lives until this
# returns. It flushes and saves its state, from which the trial goes on elsewhere without loss.
_leaving, _idle = threading.Event(), threading.Event()
_idle.set()


@atexit.register
def _leave() -> None:
    _leaving.set()
    _idle.wait(GRACE_SECONDS)


def train_trial(
    job: dict[str, Any],
    tell: Callable[[dict[str, Any]], Any],
    *,
    rank: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train a trial from its last checkpoint and `tell` at every flush; only the first rank writes."""
    import torch

    on_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)  # one core a trial; more would fight, and sum in another order

    from models.imports import look_in
    from study.checkpoints import same_checkpoint
    from study.config import TrialConfig
    from study.data import load_corpus
    from study.forwarding import Loggers
    from study.loggers import LoggedTrial
    from study.selectors import flatten
    from study.storage import Storage
    from study.train import train

    storage = Storage(job["storage"])
    look_in(job["paths"])
    config = TrialConfig.model_validate(job["trial"])
    data = load_corpus(config.data)
    writer, state = _resume(storage, job) if rank == 0 else (None, None)
    if writer and writer.attempt > 2:  # it dies again and again: what kills it may pass
        time.sleep(min(BACK_OFF_SECONDS, 0.25 * 2 ** (writer.attempt - 2)))
    if config.workers > 1:
        state = same_checkpoint(storage, job["run_id"], job["trial_id"], state)
    step = state["step"] if state else 0
    device = "cuda" if on_gpu else "cpu"
    reports = train(config, data, device=device, state=state, flush_seconds=job["flush_seconds"], stop=stop)
    names = (job["run_id"], job["trial_id"], job["arm"])
    logged = LoggedTrial(*names, flatten(job["trial"]), storage, writer.attempt if writer else 0, step)
    with Loggers(job["loggers"] if writer else [], logged) as loggers:
        _record(job, storage, reports, writer, loggers, step, tell, stop)


def _record(
    job: dict[str, Any], storage: Any, reports: Any, writer: Any, loggers: Any, started_at: int,
    tell: Callable[[dict[str, Any]], Any], stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Write what each report brings, and tell of it; the trial goes on from `started_at`.

    Without a writer, on all ranks but the first, nothing is written.
    """
    from study.checkpoints import save_checkpoint

    began = last_report = checkpointed = time.monotonic()
    last_step = started_at
    for report in reports:
        ended = report.status != "running"
        now = time.monotonic()
        if report.rows and writer:
            writer.append(report.rows)
            loggers.log(report.rows)  # before the checkpoint: what it holds is not recorded again
        due = now - checkpointed >= job["checkpoint_seconds"] or stop()
        if report.agree(report.status == "finished" or (not ended and due)):
            content = report.state()
            if writer:
                save_checkpoint(storage, job["run_id"], job["trial_id"], content)
            checkpointed = now
        if not ended and stop():
            return
        details: dict[str, Any] = {
            "status": report.status,
            "reason": report.reason,
            "diverged_step": report.diverged_step,
            "loss": _last(report.rows, "loss"),
            "grad_norm": _last(report.rows, "grad_norm"),
            "steps_per_second": (report.step - last_step) / max(now - last_report, 1e-9),
            "data_wait": report.data_wait,
            "resumed_from": started_at,
            "attempt": writer.attempt if writer else None,
            "seconds": now - began,
        }
        if ended and writer:
            writer.close()
            details["summary"] = _summary(storage, job, report)
            loggers.end(report.status, details["summary"] | {"reason": report.reason})
        details["notes"] = loggers.notes
        last_report, last_step = now, report.step
        _report(tell, report.step, details["loss"], details)


def _report(
    tell: Callable[[dict[str, Any]], Any], step: int, objective: float | None, details: dict[str, Any]
) -> None:
    """A few finite numbers to Tune; all else as one string that it doesn't look into."""
    tell(
        {
            "step": step,
            "objective": NOT_FINITE if objective is None else objective,
            "details": json.dumps(details, allow_nan=False),
        }
    )


def _resume(storage: Any, job: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The writer and the state of the newest checkpoint that the trace reaches; else from the start."""
    from study.checkpoints import load_checkpoints
    from study.traces import TraceError, TraceWriter

    for state in load_checkpoints(storage, job["run_id"], job["trial_id"]):
        try:
            return TraceWriter(storage, job["run_id"], job["trial_id"], after=state["step"]), state
        except TraceError:
            continue  # rows before it are gone: they are recorded again from an older state
    return TraceWriter(storage, job["run_id"], job["trial_id"]), None


def _last(rows: dict[str, Any], column: str) -> float | None:
    value = float(rows[column][-1]) if rows else math.nan
    return value if math.isfinite(value) else None


def _summary(storage: Any, job: dict[str, Any], report: Any) -> dict[str, Any]:
    from study.metrics import summarize
    from study.traces import read_trace

    trace = read_trace(storage, job["run_id"], job["trial_id"])
    num_steps = job["trial"]["steps"]
    return summarize(trace.columns(), status=report.status, reason=report.reason, num_steps=num_steps)

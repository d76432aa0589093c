"""The driver: takes the trials of a study through Ray Tune and keeps the books.

Tune schedules, restarts and stops the trials; what happened is told by its callbacks to the
catalogue (from a thread) and to the progress display. Traces never pass through here.
"""

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # they triple the cost of a report
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "16")  # with a searcher it would start one by one

import ray
from ray import tune
from rich.console import Console

from models.imports import search_paths
from study.bookkeeper import Bookkeeper
from study.catalogue import Catalogue
from study.config import ConfigError, StudyConfig
from study.progress import Line, Progress
from study.rows import Job, trial_row
from study.search import ENDED, Search
from study.searcher import JobSearcher, scheduler
from study.space import Plan, num_rooms, num_workers, trial_resources
from study.storage import Storage
from study.worker import run_trial

# What of a worker's report goes into the catalogue's row of its trial.
REPORTED = ("status", "reason", "diverged_step", "loss", "grad_norm", "steps_per_second", "summary", "error")
WAITING = {"memory": 2.0**20}  # of a trial that only waits for its workers; nothing at all is refused
OBJECT_STORE_BYTES = 100 * 2**20  # traces don't pass through it


@dataclass(frozen=True)
class Settings:
    """Where a run goes and what it may use."""

    run_id: str
    storage: str
    catalogue: Catalogue
    console: Console
    max_concurrent: int | None = None


logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what it says of trials, the display says


def connect(address: str | None) -> list[dict[str, Any]]:
    """Start Ray on this machine, or join the cluster at `address`; its nodes."""
    if ray.is_initialized():  # this is a task of the cluster: see remote.py
        return [dict(node) for node in ray.nodes()]
    if address is None:
        ray.init(
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    else:
        _check_address(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            text = " ".join(str(error).split())
            if "Failed to connect" in text:
                text += "; its token must be this one's too (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
            raise ConfigError(f"no Ray cluster at '{address}': {text} (--address)") from error
    return [dict(node) for node in ray.nodes()]


def _check_address(address: str) -> None:
    """ConfigError where Ray would wait for minutes, or fail once the run has begun."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # auto and the like: Ray finds out
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster at '{address}': {error} (--address)") from error


class Events(tune.Callback):
    """What Tune says of the trials, passed on; keeps the last state of each."""

    def __init__(self, books: Bookkeeper, progress: Progress, attempts: dict[str, int]) -> None:
        self.books, self.progress, self.attempts = books, progress, dict(attempts)
        self.status: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {}  # of each trial, as its row has them

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles the experiment with its callbacks; these live in the driver alone

    def _changed(self, trial: Any, *, shown: dict[str, Any] | None = None, **values: Any) -> None:
        trial_id = trial.config["job"]["trial_id"]
        self.status[trial_id] = values.get("status", self.status.get(trial_id, "pending"))
        self.books.trial_changed(trial_id, **values)
        fields = {key: values[key] for key in ("status", "step", "loss", "grad_norm") if key in values}
        self.progress.update(trial_id, **fields, **(shown or {}))

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        trial_id = trial.config["job"]["trial_id"]
        self.attempts[trial_id] = self.attempts.get(trial_id, 0) + 1
        values: dict[str, Any] = {"status": "running", "attempts": self.attempts[trial_id]}
        if self.attempts[trial_id] == 1:
            values["started_at"] = time.time()
        self._changed(trial, heartbeat=time.time(), **values)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        details = json.loads(result["details"])
        ended = details["status"] in ENDED
        values = {key: details[key] for key in REPORTED if details.get(key) is not None}
        values |= {"heartbeat": time.time()} | ({"ended_at": time.time()} if ended else {})
        note = details.get("error", "")[:60]
        if details.get("reason"):
            note = f"{details['reason']} at {details['diverged_step']:,}"
        if not details.get("error"):
            values |= {"step": result["step"], "error": None}
        if new := details.get("notes"):
            known = self.notes.setdefault(trial.config["job"]["trial_id"], [])
            known += [one for one in new if one not in known]
            values["notes"] = list(known)
            note = note or new[-1][:60]
        shown = {key: details[key] for key in ("steps_per_second", "data_wait") if key in details}
        self._changed(trial, shown=shown | {"note": note}, **values)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # What goes on when Tune says it is complete was stopped by a scheduler.
        if self.status.get(trial.config["job"]["trial_id"]) == "running":
            self._changed(trial, status="pruned", ended_at=time.time())

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Without a heartbeat: one that waits for room is not lost.
        waits: dict[str, Any] = {"status": "pending", "heartbeat": None, "error": _reason(trial)}
        self._changed(trial, shown={"note": "restarts"}, **waits)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = _reason(trial)
        self._changed(trial, status="failed", error=error, ended_at=time.time(), shown={"note": error[:60]})


def _reason(trial: Any) -> str:
    """The last line of what a trial died of: an exception's text, or Ray's word for a lost worker."""
    error = trial.get_error()
    text = str(error.cause if hasattr(error, "cause") and error.cause else error).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:500] if lines else "no reason was given"


def run_jobs(
    study: StudyConfig,
    jobs: Sequence[Job],
    settings: Settings,
    nodes: list[dict[str, Any]],
    attempts: dict[str, int] | None = None,
    search: Search[Job] | None = None,
) -> None:
    """Take the jobs, whose rows are in the catalogue, through Tune, and those that `search` suggests.

    `attempts`: how often each trial was started before. Ctrl-C and SIGTERM end it early.
    """
    wanted, workers = trial_resources(study, nodes), num_workers(study)
    limit, rooms = settings.max_concurrent or study.search.max_concurrent, num_rooms(wanted, nodes) // workers
    if workers > 1:
        limit = min(limit or rooms, rooms)  # Tune doesn't know what they take
    elif search:
        limit = limit or rooms  # a point that waits for room could have been suggested with more knowledge
    storage = Storage(settings.storage)
    lines: dict[str, Line] = {}

    def spec(job: Job) -> dict[str, Any]:
        return {
            "run_id": settings.run_id,
            "trial_id": job.plan.trial_id(settings.run_id),
            "arm": job.plan.arm,
            "trial": job.plan.config.model_dump(),
            "paths": search_paths(),
            "storage": settings.storage,
            "flush_seconds": study.flush_seconds,
            "checkpoint_seconds": study.checkpoint_seconds,
            "resources": wanted,
            "max_failures": study.max_failures,
            "loggers": study.loggers,
        }

    def show(new: Sequence[Job]) -> None:
        for job in new:
            events.notes[job.plan.trial_id(settings.run_id)] = list(job.estimate.notes)
            line = Line(_shown_name(study, job.plan), job.plan.config.steps)
            progress.add(job.plan.trial_id(settings.run_id), line)

    def adopt(new: Sequence[Job]) -> None:
        books.trial_added(*[trial_row(job, settings.run_id) for job in new])
        books.write_now()  # before its result can be told: a search must not know more than the catalogue
        show(new)

    with (
        Bookkeeper(settings.catalogue, settings.run_id) as books,
        Progress(settings.console, lines) as progress,
    ):
        events = Events(books, progress, attempts or {})
        show(jobs)
        searcher = JobSearcher(
            jobs,
            spec,
            search=search,
            adopt=adopt,
            max_concurrent=limit,
            time_budget=study.search.time_budget,
        )
        tuner = tune.Tuner(
            tune.with_resources(run_trial, tune.PlacementGroupFactory([wanted if workers == 1 else WAITING])),
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=scheduler(study, [job.plan.config.steps for job in jobs]),
                num_samples=-1,  # until the searcher has no more
                # A new process a trial costs 4 s of a core; on a GPU its end is what frees the memory.
                reuse_actors=not wanted.get("GPU"),
                trial_dirname_creator=lambda trial: trial.config["job"]["trial_id"],
            ),
            run_config=tune.RunConfig(
                name=f"tune-{time.strftime('%Y%m%d-%H%M%S')}",  # Tune overwrites a name that exists
                # The file system that was checked, not one that Ray would make of the address again.
                storage_path=storage.path(settings.run_id),
                storage_filesystem=None if storage.is_local else storage.fs,
                failure_config=tune.FailureConfig(max_failures=study.max_failures),
                callbacks=[events],
                verbose=0,
            ),
        )
        # A preempted node is told by SIGTERM: it ends like Ctrl-C, which Tune knows.
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            tuner.fit()
        finally:
            signal.signal(signal.SIGTERM, before)
        _close_books(events, lines, searcher.points_left())


def _close_books(events: Events, lines: dict[str, Line], left: int) -> None:
    """The run's last word: trials that were cut off, and points that are `left`, wait for a resume."""
    for trial_id in lines:
        if events.status.get(trial_id) not in ENDED:
            events.status[trial_id] = "pending"
            events.books.trial_changed(trial_id, status="pending", heartbeat=None)
    statuses = [events.status[trial_id] for trial_id in lines]
    if "pending" in statuses or left:
        status = "interrupted"
    else:
        status = "failed" if all(one == "failed" for one in statuses) else "finished"
    events.books.run_changed(status=status, ended_at=time.time(), heartbeat=time.time())


def _shown_name(study: StudyConfig, plan: Plan) -> str:
    return f"{plan.arm} (seed {plan.config.seed})" if study.search.seeds > 1 else plan.arm

"""What can be done with a run: start it, resume it, watch it, delete it.

Everything that can be refused is refused before anything is made.
"""

import re
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from study.catalogue import Catalogue
from study.config import ConfigError, StudyConfig, TrialConfig, load_study, study_source
from study.data import Tokens, load_corpus
from study.driver import Job, Settings, connect, driver_name, is_driving, run_jobs, run_row, trial_row
from study.estimates import estimate
from study.progress import Line, Progress
from study.space import Plan, plan_trials, trial_resources
from study.storage import Storage
from study.tables import plan_table, print_results

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Place:
    """Where runs lie and what a run may use, as the command line says it."""

    storage: Storage
    catalogue: Catalogue
    address: str | None = None
    max_concurrent: int | None = None

    @classmethod
    def of(cls, storage: str, db: str | None, **rest: Any) -> "Place":
        """The place at a storage URI; its database is a SQLite file there unless `db` says otherwise."""
        opened = Storage(storage)
        if db is None and not opened.is_local:
            raise ConfigError(f"storage '{storage}' is remote, no database can lie beside it: use --db URL")
        return cls(opened, Catalogue(db or f"sqlite:///{opened.root}/gradnorm.db"), **rest)


def plan_run(name: str, overrides: list[str]) -> tuple[StudyConfig, list[Job], list[Tokens]]:
    """A study with its trials, each known to be buildable, and its corpora."""
    study, where = load_study(name, overrides), study_source(name)
    plans = plan_trials(study, where)
    data: dict[str, Tokens] = {}
    for plan in plans:
        if str(plan.config.data) not in data:
            data[str(plan.config.data)] = load_corpus(plan.config.data)
    jobs = [Job(plan, estimate(plan.config, data[str(plan.config.data)], where)) for plan in plans]
    return study, jobs, list(data.values())


def show_plan(name: str, overrides: list[str], console: Console) -> int:
    """Print what a study would run."""
    study, jobs, _ = plan_run(name, overrides)
    console.print(plan_table(study, jobs))
    return 0


def start_run(name: str, overrides: list[str], run_id: str | None, place: Place, console: Console) -> int:
    """Run a study; returns the exit status."""
    study, jobs, data = plan_run(name, overrides)
    run_id = run_id or f"{_slug(study.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not RUN_ID.fullmatch(run_id) or run_id == "latest":
        raise ConfigError(f"run id '{run_id}' must be 1 to 64 of a-z, 0-9 and '-', not '-' first (--run-id)")
    storage, catalogue = place.storage, place.catalogue
    catalogue.update()
    if storage.exists(run_id) or (catalogue.is_there() and catalogue.run(run_id)):
        raise ConfigError(f"run '{run_id}' exists already in {storage.uri} (--run-id)")
    nodes = connect(place.address)
    trial_resources(study, nodes)
    storage.check_writable()
    catalogue.migrate()
    settings = Settings(run_id, storage.uri, catalogue, console, place.max_concurrent)
    identities = [tokens.identity for tokens in data]
    catalogue.add_run(run_row(study, settings, identities), [trial_row(job, run_id) for job in jobs])
    console.print(f"run {run_id}: {len(jobs)} trials of study {study.name}", highlight=False)
    run_jobs(study, jobs, settings, nodes)
    return print_results(console, catalogue, run_id)


def resume_run(run_id: str, place: Place, console: Console) -> int:
    """Go on with the trials of a run that have not ended, each from its last checkpoint, exactly.

    It is rebuilt from the catalogue and the checkpoints; Ray's own record of the experiment is not
    needed, so nothing in it can be stale. A run whose driver is alive is refused.
    """
    place.catalogue.update()
    run = find_run(run_id, place)
    if is_driving(run):
        raise ConfigError(f"run '{run['id']}' is being driven on {run['host']} (--resume)")
    study = StudyConfig.model_validate(run["config"])
    rows = [
        row
        for row in place.catalogue.trials(run["id"])
        if row["status"] not in ("finished", "diverged", "pruned")
    ]
    if not rows:
        console.print(f"run {run['id']} has no trial left to resume")
        return print_results(console, place.catalogue, run["id"])
    jobs, data = _jobs_of(rows)
    if known := {one["sha256"] for one in run["data"]} - {one.identity["sha256"] for one in data}:
        raise ConfigError(
            f"the corpus has changed since run '{run['id']}': no data with sha256 {known.pop()[:12]}"
        )
    nodes = connect(place.address)
    trial_resources(study, nodes)
    settings = Settings(run["id"], place.storage.uri, place.catalogue, console, place.max_concurrent)
    attempts = {row["id"]: row["attempts"] for row in rows}
    now = time.time()
    place.catalogue.save(
        run["id"], {"status": "running", "host": driver_name(), "heartbeat": now, "ended_at": None}
    )
    console.print(f"run {run['id']} goes on: {len(jobs)} trials are left", highlight=False)
    run_jobs(study, jobs, settings, nodes, attempts)
    return print_results(console, place.catalogue, run["id"])


def _jobs_of(rows: list[dict[str, Any]]) -> tuple[list[Job], list[Tokens]]:
    data: dict[str, Tokens] = {}
    jobs = []
    for row in rows:
        config = TrialConfig.model_validate(row["config"])
        key = str(config.data)
        if key not in data:
            data[key] = load_corpus(config.data)
        plan = Plan(row["number"], row["arm"], row["arm_number"], row["overrides"], config)
        jobs.append(Job(plan, estimate(config, data[key])))
    return jobs, list(data.values())


def find_run(run_id: str, place: Place) -> dict[str, Any]:
    """The catalogue's row of a run (or `latest`); ConfigError if there is none."""
    run = place.catalogue.run(run_id) if place.catalogue.is_there() else None
    if run is None:
        known = [row["id"] for row in place.catalogue.runs(limit=5)] if place.catalogue.is_there() else []
        raise ConfigError(
            f"no run '{run_id}' in {place.catalogue.name}; newest: {', '.join(known) or 'none'}"
        )
    return run


def watch_run(run_id: str, place: Place, console: Console) -> int:
    """Show the progress of a run that another process drives, until it ends; its exit status."""
    run_id = find_run(run_id, place)["id"]
    rows = place.catalogue.trials(run_id)
    lines = {row["id"]: Line(row["arm"], row["num_steps"]) for row in rows}
    with Progress(console, lines) as progress:
        while True:
            for row in place.catalogue.trials(run_id):
                if row["id"] not in lines:
                    progress.add(row["id"], Line(row["arm"], row["num_steps"]))
                shown = ("status", "step", "loss", "grad_norm")
                progress.update(
                    row["id"],
                    **{name: row[name] for name in shown},
                    steps_per_second=row["steps_per_second"] or 0.0,
                    note=row["reason"] or "",
                )
            if find_run(run_id, place)["status"] not in ("pending", "running"):
                break
            time.sleep(1.0)
    return print_results(console, place.catalogue, run_id)


def delete_run(run_id: str, place: Place, console: Console, ask: bool) -> int:
    """Remove a run from the catalogue, then its traces and checkpoints; asks first."""
    run = find_run(run_id, place)
    if run["status"] in ("pending", "running"):
        raise ConfigError(
            f"run '{run['id']}' is being run by a driver on {run['host']}: end it first (--delete)"
        )
    size = place.storage.size(run["id"]) / 2**20
    if (
        ask
        and console.input(f"delete run {run['id']} with {size:,.1f} MiB in {place.storage.uri}? [y/N] ")
        != "y"
    ):
        console.print("nothing was deleted")
        return 0
    place.catalogue.delete_run(run["id"])
    place.storage.delete_folder(run["id"])
    console.print(f"run {run['id']} is deleted")
    return 0


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"

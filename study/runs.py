"""Runs begin and go on here: planned, started, resumed, concluded; upkeep.py has what comes after.

Everything that can be refused is refused before anything is made.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from study.catalogue import Catalogue, CatalogueError
from study.claims import check as check_claims
from study.claims import parse as parse_claims
from study.config import ConfigError, StudyConfig, TrialConfig, load_study, study_source, trial_config
from study.data import Tokens, load_corpus
from study.disk import print_disk_use, warn_of_a_full_disk
from study.driver import Settings, connect, run_jobs
from study.estimates import estimate
from study.forwarding import check_loggers, prepare_loggers
from study.objectives import conclude
from study.reading import arms_of, read, to_markdown
from study.rows import Job, driver_name, is_driving, run_row, trial_row
from study.search import Away, Search
from study.space import Plan, named_arms, plan_trials, trial_resources
from study.storage import Storage
from study.tables import plan_table, print_results
from study.validation import validate

CONTRADICTED = 3  # exit status of a run that is whole and contradicts a claim of its study
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


def plan_run(
    name: str, overrides: list[str], profile: str | None = None
) -> tuple[StudyConfig, list[Job], dict[str, Tokens]]:
    """A study with its trials, each known to be buildable, and its corpora."""
    study, where = load_study(name, overrides, profile), study_source(name)
    data: dict[str, Tokens] = {}
    make = _job_maker(data, where)
    jobs = [make(plan) for plan in plan_trials(study, where)]
    if study.search.algorithm == "optuna":
        _load_arms_data(study, data)
    try:
        # A search's arms are not known before it; then claims are only read.
        arms = arms_of([trial_row(job, "planned") for job in jobs])
        check_claims(study.claims, arms) if arms else parse_claims(study.claims)
    except ValueError as error:
        raise ConfigError(f"{error} ({where}: claims)") from error
    return study, jobs, data


def _job_maker(data: dict[str, Tokens], where: str = "") -> Callable[[Plan], Job]:
    """What turns a Plan into a Job; keeps in `data` the corpora that it loads. It raises ConfigError."""

    def make(plan: Plan) -> Job:
        key = str(plan.config.data)
        if key not in data:
            data[key] = load_corpus(plan.config.data)
        return Job(plan, estimate(plan.config, data[key], where))

    return make


def show_plan(
    name: str, overrides: list[str], place: Place, console: Console, profile: str | None = None
) -> int:
    """Print what a study would run."""
    study, jobs, _ = plan_run(name, overrides, profile)
    check_loggers(study.loggers, place.storage, study_source(name))
    console.print(plan_table(study, jobs))
    return 0


def start_run(
    name: str,
    overrides: list[str],
    run_id: str | None,
    place: Place,
    console: Console,
    profile: str | None = None,
) -> int:
    """Run a study; returns the exit status."""
    study, jobs, data = plan_run(name, overrides, profile)
    check_loggers(study.loggers, place.storage, study_source(name))
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
    identities = [tokens.identity for tokens in data.values()]
    catalogue.add_run(
        run_row(study, run_id, storage.uri, identities), [trial_row(job, run_id) for job in jobs]
    )
    search = _open_search(study, run_id, place, data, [])
    count = len(jobs) if search is None else search.left * study.search.seeds * search.width
    console.print(f"run {run_id}: {count} trials of study {study.name}", highlight=False)
    warn_of_a_full_disk(storage, sum(job.estimate.num_parameters for job in jobs), console)
    prepare_loggers(study.loggers, console.out)
    run_jobs(study, jobs, settings, nodes, search=search)
    return conclude_run(study, run_id, place, console, search)


def _load_arms_data(study: StudyConfig, data: dict[str, Tokens]) -> None:
    """The corpora of a search, whose trials are made as it goes: its space can't hold other ones."""
    for _, overrides in named_arms(study):
        of_data = {key: value for key, value in overrides.items() if key.split(".")[0] == "data"}
        config = trial_config(study.trial, of_data)
        if str(config.data) not in data:
            data[str(config.data)] = load_corpus(config.data)


def _open_search(
    study: StudyConfig, run_id: str, place: Place, data: dict[str, Tokens], rows: list[dict[str, Any]]
) -> Search[Job] | None:
    """The search of an optuna study, with its history; its studies lie beside the catalogue's tables."""
    if study.search.algorithm != "optuna":
        return None
    _load_arms_data(study, data)
    url = place.catalogue.url.render_as_string(hide_password=False)
    try:
        return Search(study, run_id, url, _job_maker(data), rows)
    except Away as error:
        raise ConfigError(f"database '{place.catalogue.name}' can't keep the search: {error}") from error


def conclude_run(
    study: StudyConfig, run_id: str, place: Place, console: Console, search: Search[Job] | None = None
) -> int:
    """Settle a search and say what came out; the exit status."""
    try:
        if search is not None:
            search.settle()
    except Away as error:
        raise CatalogueError(f"database '{place.catalogue.name}' is away, resume later: {error}") from error
    run = find_run(run_id, place)
    trials = place.catalogue.trials(run_id)
    results, notes = conclude(study, trials)
    notes = list(dict.fromkeys([*(run["notes"] or []), *(search.notes if search else []), *notes]))
    reading = read(run, arms_of(trials))
    results = (run["results"] or {}) | results | {"verdicts": reading["verdicts"]}
    place.catalogue.save(run_id, {"results": results, "notes": notes})
    status = print_results(console, place.catalogue, run_id)
    if status in (0, 1):
        text = to_markdown(reading)
        if console.is_terminal:
            console.print(Markdown(text))
        else:
            console.print(Text(text), soft_wrap=True)  # a table's row that is broken is none
    if status == 0 and any(verdict["verdict"] == "contradicted" for verdict in reading["verdicts"]):
        status = CONTRADICTED
    print_disk_use(place.storage, run_id, [trial["id"] for trial in trials], console)
    return status


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
    check_loggers(study.loggers, place.storage, f"run {run['id']}")
    rows = place.catalogue.trials(run["id"])
    data: dict[str, Tokens] = {}
    waiting = [row for row in rows if row["status"] not in ("finished", "diverged", "pruned")]
    jobs = _jobs_of(waiting, data)
    search = _open_search(study, run["id"], place, data, rows)
    if not jobs and not (search and search.left):
        console.print(f"run {run['id']} has no trial left to resume")
        return conclude_run(study, run["id"], place, console, search)
    known = {one["sha256"] for one in run["data"]}
    if changed := {tokens.identity["sha256"] for tokens in data.values()} - known:
        raise ConfigError(
            f"the corpus has changed since run '{run['id']}': sha256 {changed.pop()[:12]} is not among its data"
        )
    nodes = connect(place.address)
    trial_resources(study, nodes)
    settings = Settings(run["id"], place.storage.uri, place.catalogue, console, place.max_concurrent)
    attempts = {row["id"]: row["attempts"] for row in waiting}
    now = time.time()
    place.catalogue.save(
        run["id"], {"status": "running", "host": driver_name(), "heartbeat": now, "ended_at": None}
    )
    points = f" and {search.left} points" if search else ""
    console.print(f"run {run['id']} goes on: {len(jobs)} trials{points} are left", highlight=False)
    prepare_loggers(study.loggers, console.out)
    run_jobs(study, jobs, settings, nodes, attempts, search)
    return conclude_run(study, run["id"], place, console, search)


def _jobs_of(rows: list[dict[str, Any]], data: dict[str, Tokens]) -> list[Job]:
    make = _job_maker(data)
    return [
        make(
            Plan(
                row["number"],
                row["arm"],
                row["arm_number"],
                row["overrides"],
                validate(TrialConfig, row["config"], f"run '{row['run_id']}': trial"),
            )
        )
        for row in rows
    ]


def find_run(run_id: str, place: Place) -> dict[str, Any]:
    """The catalogue's row of a run (or `latest`); ConfigError if there is none."""
    run = place.catalogue.run(run_id) if place.catalogue.is_there() else None
    if run is None:
        known = [row["id"] for row in place.catalogue.runs(limit=5)] if place.catalogue.is_there() else []
        raise ConfigError(
            f"no run '{run_id}' in {place.catalogue.name}; newest: {', '.join(known) or 'none'}"
        )
    return run


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"

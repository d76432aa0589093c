"""The command: a study file in, a run in the catalogue and its traces in the storage out.

    python study/run.py                          the preset `figure`: four trainings, two minutes
    python study/run.py figure --set search.seeds=5
    python study/run.py my_study.yaml --dry-run

Exit status: 0 done, 1 a trial failed, 2 bad input, 130 interrupted.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Python puts this file's folder first on its path, where config.py and data.py would shadow others.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "study"]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

NEEDED = ("torch", "ray", "optuna", "typer", "rich", "yaml", "pydantic", "sqlalchemy", "alembic", "pyarrow")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    sys.exit(
        f"{', '.join(MISSING)} not installed; run: pip install -e '{ROOT}[study,service]' (or: make demo)"
    )

import re
import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from study.catalogue import Catalogue, CatalogueError
from study.config import ConfigError, load_study
from study.data import DataError, load_corpus
from study.driver import Job, Settings, connect, run_jobs, run_row, trial_row
from study.estimates import estimate
from study.space import plan_trials, trial_resources
from study.storage import Storage, StorageError
from study.tables import plan_table, print_results

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Place:
    """Where a run goes and what it may use, as the command line says it."""

    storage: str
    db: str | None
    run_id: str | None
    address: str | None
    max_concurrent: int | None


@app.command()
def main(
    study: Annotated[str, typer.Argument(help="A preset's name or a study file.")] = "figure",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=c, for any key; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the trials; run nothing.")] = False,
    storage: Annotated[
        str, typer.Option(envvar="GRADNORM_STORAGE", help="Folder or URI of traces.")
    ] = "runs",
    db: Annotated[str | None, typer.Option(envvar="GRADNORM_DB", help="Database URL [SQLite there].")] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run [study and time].")] = None,
    address: Annotated[str | None, typer.Option(envvar="RAY_ADDRESS", help="Cluster [this machine].")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Trials at once [what fits].")] = None,
) -> None:
    """Run a study: train its trials in parallel, record every step, say what came out."""
    place = Place(storage, db, run_id, address, max_concurrent)
    try:
        status = execute(study, overrides or [], place, dry_run)
    except (ConfigError, DataError, StorageError, CatalogueError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def execute(name: str, overrides: list[str], place: Place, dry_run: bool) -> int:
    """Run the study `name`; the exit status. Nothing is made before all that can be checked is."""
    console = Console(width=None if sys.stdout.isatty() else 140)  # a log has no width
    study = load_study(name, overrides)
    plans = plan_trials(study, name)
    data = {str(plan.config.data): load_corpus(plan.config.data) for plan in plans[:: study.search.seeds]}
    jobs = [
        Job(plan, estimate(plan.config, data[str(plan.config.data)], f"{name}: arm '{plan.arm}'"))
        for plan in plans
    ]
    if dry_run:
        console.print(plan_table(study, jobs))
        return 0
    run_id = place.run_id or f"{_slug(study.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id '{run_id}' must be 1 to 64 of a-z, 0-9 and '-', not '-' first (--run-id)")
    storage = Storage(place.storage)
    catalogue = Catalogue(place.db or f"sqlite:///{storage.root if storage.is_local else 'runs'}/gradnorm.db")
    if storage.exists(run_id) or (catalogue.is_there() and catalogue.run(run_id)):
        raise ConfigError(f"run '{run_id}' exists already in {storage.uri} (--run-id)")
    nodes = connect(place.address)
    trial_resources(study, nodes)
    storage.check_writable()
    catalogue.migrate()
    settings = Settings(run_id, storage.uri, catalogue, console, place.max_concurrent)
    identities = [tokens.identity for tokens in data.values()]
    catalogue.add_run(run_row(study, settings, identities), [trial_row(job, run_id) for job in jobs])
    console.print(f"run {run_id}: {len(jobs)} trials of study {study.name}", highlight=False)
    run_jobs(study, jobs, settings, nodes)
    return print_results(console, catalogue, run_id)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"


if __name__ == "__main__":
    app()

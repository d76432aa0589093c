"""The command: a study file in, a run in the catalogue and its traces in the storage out.

    python study/run.py                          the preset `figure`: four trainings, two minutes
    python study/run.py figure --set search.seeds=5
    python study/run.py my_study.yaml --dry-run

Exit status: 0 done, 1 a trial failed, 2 bad input, 3 a claim is contradicted, 130 interrupted.
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
    sys.stderr.write(
        f"{', '.join(MISSING)} not installed; run: pip install -e '{ROOT}[study,service]' (or: make demo)\n"
    )
    sys.exit(2)

from typing import Annotated

import typer
from rich.console import Console

from study.catalogue import CatalogueError
from study.config import ConfigError
from study.data import DataError
from study.remote import run_behind_client
from study.runs import Place, resume_run, show_plan, start_run
from study.storage import StorageError
from study.upkeep import delete_run, recompute_run, watch_run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    study: Annotated[str, typer.Argument(help="A preset's name or a study file.")] = "figure",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=c, for any key; repeatable.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="One of the study's own profiles, such as gpu: its long form.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the trials; run nothing.")] = False,
    storage: Annotated[str, typer.Option(envvar="GRADNORM_STORAGE", help="Folder or URI.")] = "runs",
    db: Annotated[str | None, typer.Option(envvar="GRADNORM_DB", help="Database URL [SQLite there].")] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run [study and time].")] = None,
    address: Annotated[str | None, typer.Option(envvar="RAY_ADDRESS", help="Cluster [this machine].")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Trials at once [what fits].")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a run that was cut short.")] = None,
    watch: Annotated[str | None, typer.Option(help="Show the progress of a run.")] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Compute a run's numbers anew from its traces.")
    ] = None,
    delete: Annotated[str | None, typer.Option(help="Delete a run with its traces; asks first.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Run a study: train its trials in parallel, record every step, say what came out."""
    console = Console(width=None if sys.stdout.isatty() else 140)  # a log has no width
    try:
        place = Place.of(storage, db, address=address, max_concurrent=max_concurrent)
        if dry_run:
            status = show_plan(study, overrides or [], place, console, profile)
        elif address is not None and address.startswith("ray://") and not (watch or recompute or delete):
            status = run_behind_client(
                address, sys.argv[1:], place, storage, study, overrides or [], profile, resume
            )
        elif resume is not None:
            status = resume_run(resume, place, console)
        elif watch is not None:
            status = watch_run(watch, place, console)
        elif recompute is not None:
            status = recompute_run(recompute, place, console)
        elif delete is not None:
            status = delete_run(delete, place, console, ask=not yes)
        else:
            status = start_run(study, overrides or [], run_id, place, console, profile)
    except (ConfigError, DataError, StorageError, CatalogueError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    app()

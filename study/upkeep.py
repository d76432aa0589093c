"""What is done with runs that are there: watch one, compute its numbers anew, delete it."""

import time
from typing import Any

from rich.console import Console

from study.config import ConfigError, StudyConfig
from study.metrics import summarize
from study.progress import Line, Progress
from study.runs import Place, conclude_run, find_run
from study.tables import print_results
from study.traces import read_trace


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


def recompute_run(run_id: str, place: Place, console: Console) -> int:
    """Compute the stability numbers of a run's trials anew from their traces; its exit status."""
    place.catalogue.update()
    run = _ended(run_id, place, "--recompute")
    changes = {}
    for row in place.catalogue.trials(run["id"]):
        if row["status"] not in ("finished", "diverged"):
            continue  # one that failed or was pruned has no numbers
        trace = read_trace(place.storage, run["id"], row["id"])
        if trace.unreadable or not trace.table.num_rows:
            problem = trace.unreadable[0] if trace.unreadable else "there is none"
            raise ConfigError(f"trace of {row['id']} can't be read whole: {problem} (--recompute)")
        about = {name: row[name] for name in ("status", "reason", "num_steps")}
        changes[row["id"]] = {"summary": summarize(trace.columns(), **about)}
    place.catalogue.save(run["id"], {}, changes=changes)
    console.print(f"run {run['id']}: numbers of {len(changes)} trials are computed anew", highlight=False)
    return conclude_run(StudyConfig.model_validate(run["config"]), run["id"], place, console)


def _ended(run_id: str, place: Place, option: str) -> dict[str, Any]:
    run = find_run(run_id, place)
    if run["status"] in ("pending", "running"):
        raise ConfigError(
            f"run '{run['id']}' is being run by a driver on {run['host']}: end it first ({option})"
        )
    return run


def delete_run(run_id: str, place: Place, console: Console, ask: bool) -> int:
    """Remove a run from the catalogue, then its traces and checkpoints; asks first."""
    run = _ended(run_id, place, "--delete")
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

"""What the command prints: the trials of a plan, and the results of a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from study.catalogue import Catalogue
from study.progress import COLORS, number

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.rows import Job


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        words = name in ("arm", "status", "trial")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=name != "arm")
    return table


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return [Text(f"note: {note}") for note in dict.fromkeys(notes)]


def plan_table(study: "StudyConfig", jobs: Sequence["Job"]) -> RenderableType:
    """Every trial with its parameters and estimated memory, and which arms change nothing."""
    table = _table("trial", "arm", "seed", "steps", "parameters", "memory")
    for job in jobs:
        table.add_row(
            f"{job.plan.number:05d}",
            Text(job.plan.arm),
            str(job.plan.config.seed),
            f"{job.plan.config.steps:,}",
            f"{job.estimate.num_parameters:,}",
            f"{job.estimate.memory / 2**20:,.0f} MiB",
        )
    notes = [f"{job.plan.arm}: {note}" for job in jobs for note in job.estimate.notes]
    title = f"study {study.name}: {len(jobs)} trials"
    if study.search.algorithm == "optuna":
        arms, points, seeds = max(1, len(study.arms)), study.search.num_samples, study.search.seeds
        title = f"study {study.name}: {points} points for each of {arms} arms with {seeds} seeds, from optuna"
    return Group(Text(title), table, *_notes(notes))


def results_table(trials: Sequence[dict[str, Any]]) -> RenderableType:
    """One line a trial: how it ended and its main numbers; '*' marks an arm with a note below."""
    table = _table(
        "arm", "seed", "status", "steps", "final loss", "peak norm", "at step", "median norm", "clipped"
    )
    for trial in trials:
        summary = trial["summary"] or {}
        status = f"{trial['status']} ({trial['reason']})" if trial["reason"] else trial["status"]
        peak_step, clipped = summary.get("peak_step"), summary.get("clipped_fraction")
        table.add_row(
            Text(trial["arm"] + (" *" if trial["notes"] else "")),
            str(trial["seed"]),
            Text(status, COLORS.get(trial["status"], "dim")),
            f"{trial['step']:,}",
            number(summary.get("final_loss")),
            number(summary.get("peak_grad_norm")),
            "-" if peak_step is None else f"{peak_step:,}",
            number(summary.get("median_grad_norm")),
            "-" if clipped is None else f"{clipped:.0%}",
        )
    notes = [f"* {trial['arm']}: {note}" for trial in trials for note in trial["notes"] or []]
    errors = [f"{trial['id']} failed: {trial['error']}" for trial in trials if trial["status"] == "failed"]
    return Group(table, *_notes(notes), *[Text(error, "red") for error in errors])


def conclusions(run: dict[str, Any]) -> list[str]:
    """The best arm or the Pareto front of a run, and its notes, a line each."""
    results = run["results"] or {}
    names = [one["metric"] for one in results.get("objectives", [])]
    lines = []
    for title, points in (("best", [results.get("best")]), ("Pareto front", results.get("pareto", []))):
        for point in filter(None, points):
            values = ", ".join(
                f"{name} {number(value)}" for name, value in zip(names, point["values"], strict=True)
            )
            lines.append(f"{title}: {values}  arm {point['arm_number']}: {point['arm']}")
    return lines + [f"note: {note}" for note in run["notes"] or []]


def print_results(console: Console, catalogue: Catalogue, run_id: str) -> int:
    """Print how a run came out; its exit status: 0 done, 1 a trial failed, 130 interrupted."""
    run, trials = catalogue.run(run_id), catalogue.trials(run_id)
    assert run is not None, run_id
    console.print(results_table(trials))
    for line in conclusions(run):
        console.print(line, soft_wrap=True, highlight=False)
    if run["status"] == "interrupted":
        console.print(
            f"run {run_id} was interrupted; what it recorded is in {run['storage']}", soft_wrap=True
        )
        return 130
    console.print(f"run {run_id} {run['status']}; traces in {run['storage']}/{run_id}", soft_wrap=True)
    return 1 if any(trial["status"] == "failed" for trial in trials) else 0

"""What a run takes of its storage: said before it is too late, and at the end."""

import shutil
from collections.abc import Iterable

from rich.console import Console

from study.storage import Storage

CHECKPOINT_BYTES = 12  # a parameter: weight and two moments in float32


def warn_of_a_full_disk(storage: Storage, num_parameters: int, console: Console) -> None:
    """Say it if checkpoints of so many parameters in all won't fit; one is kept, two for a moment."""
    if not storage.is_local:
        return
    needed = num_parameters * CHECKPOINT_BYTES
    free = shutil.disk_usage(storage.root).free
    if free < 2 * needed:
        console.print(
            f"warning: checkpoints will take about {needed / 2**20:,.0f} MiB; "
            f"{storage.root} has {free / 2**20:,.0f} MiB left",
            style="yellow",
        )


def print_disk_use(storage: Storage, run_id: str, trial_ids: Iterable[str], console: Console) -> None:
    """One line: what a run's traces and checkpoints take."""
    sizes = {"trace": 0, "checkpoint": 0}
    for trial_id in trial_ids:
        for kind in sizes:
            sizes[kind] += storage.size(f"{run_id}/{trial_id}/{kind}")
    traces, checkpoints = (size / 2**20 for size in sizes.values())
    console.print(f"on disk: traces {traces:,.1f} MiB, checkpoints {checkpoints:,.1f} MiB", highlight=False)

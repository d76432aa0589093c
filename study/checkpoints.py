"""Checkpoints of a trial: one file, written whole, from which train() goes on exactly.

They lie beside the trace, `<run>/<trial>/checkpoint/<step>.pt`, and are found by looking there: a
restarted trial needs neither Ray's record of the experiment nor the node that it ran on before.
"""

import io
from collections.abc import Iterator
from typing import Any

import torch

from study.ranks import said_by_the_first
from study.storage import Storage


def checkpoint_folder(run_id: str, trial_id: str) -> str:
    """Where a trial's checkpoints lie, relative to the storage root."""
    return f"{run_id}/{trial_id}/checkpoint"


def save_checkpoint(storage: Storage, run_id: str, trial_id: str, state: dict[str, Any]) -> None:
    """Write the state of a trial; the one before it is deleted after this one is there."""
    folder = checkpoint_folder(run_id, trial_id)
    older = storage.names(folder)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    name = f"{state['step']:09d}.pt"
    storage.write(f"{folder}/{name}", buffer.getvalue())
    for other in older:
        if other != name:
            storage.delete(f"{folder}/{other}")


def load_checkpoints(storage: Storage, run_id: str, trial_id: str) -> Iterator[dict[str, Any]]:
    """The states that can be read, newest first."""
    folder = checkpoint_folder(run_id, trial_id)
    for name in reversed(storage.names(folder)):
        if not name.endswith(".pt"):
            continue
        try:
            content = storage.read(f"{folder}/{name}").to_pybytes()
            yield torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except Exception:  # noqa: BLE001, S112 (torch raises many kinds; an older one may do)
            continue


def same_checkpoint(
    storage: Storage, run_id: str, trial_id: str, state: dict[str, Any] | None
) -> dict[str, Any] | None:
    """On every rank the state that the first one has chosen."""
    step = said_by_the_first(state["step"] if state else None)
    if step is None or (state and state["step"] == step):
        return state
    return next(one for one in load_checkpoints(storage, run_id, trial_id) if one["step"] == step)

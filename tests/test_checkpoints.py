"""A checkpoint is whole or it isn't one; an older one serves where the newest can't be read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.clipping import CLIPS
from study.checkpoints import checkpoint_folder, load_checkpoints, save_checkpoint
from study.storage import Storage
from study.train import Trial

RUN, TRIAL = "run", "run_00000"
FOLDER = checkpoint_folder(RUN, TRIAL)


def flatten(state: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of a nested state by its path."""
    if isinstance(state, dict):
        return {key: leaf for part in state for key, leaf in flatten(state[part], f"{name}/{part}").items()}
    if isinstance(state, list | tuple) and any(isinstance(item, dict) for item in state):
        return flatten(dict(enumerate(state)), name)
    return {name: state}


def assert_equal(one: Any, other: Any) -> None:
    ours, theirs = flatten(one), flatten(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype, name
        else:
            assert value == theirs[name], name


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_all_that_a_step_depends_on_goes_through_a_file(
    tmp_path: Path, shrink: Any, text: Any, clip: str, precision: str
) -> None:
    trial = Trial(shrink({"clip": clip, "precision": precision}), text, torch.device("cpu"))
    for _ in range(4):
        trial.run_step()
    trial.judge(trial.recorder.flush())
    storage = Storage(tmp_path)
    save_checkpoint(storage, RUN, TRIAL, trial.state_dict())
    (state,) = load_checkpoints(storage, RUN, TRIAL)
    assert_equal(trial.state_dict(), state)
    other = Trial(trial.config, text, torch.device("cpu"))
    other.load_state_dict(state)
    assert_equal(other.state_dict(), state)


def test_only_the_newest_is_kept(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    assert list(load_checkpoints(storage, RUN, TRIAL)) == []
    for step in (5, 100, 1000):
        save_checkpoint(storage, RUN, TRIAL, {"step": step, "value": torch.ones(3) * step})
        assert storage.names(FOLDER) == [f"{step:09d}.pt"]
    save_checkpoint(storage, RUN, TRIAL, {"step": 1000, "value": torch.zeros(3)})
    assert storage.names(FOLDER) == ["000001000.pt"]
    (state,) = load_checkpoints(storage, RUN, TRIAL)
    assert state["step"] == 1000 and torch.equal(state["value"], torch.zeros(3))


class Full(Storage):
    """A storage that has no room left."""

    full = False

    def write(self, name: str, content: Any) -> None:
        if self.full:
            raise OSError("No space left on device")
        super().write(name, content)


def test_a_checkpoint_that_cannot_be_written_costs_the_old_one_nothing(tmp_path: Path) -> None:
    storage = Full(tmp_path)
    save_checkpoint(storage, RUN, TRIAL, {"step": 5})
    storage.full = True
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(storage, RUN, TRIAL, {"step": 6})
    assert [state["step"] for state in load_checkpoints(storage, RUN, TRIAL)] == [5]


@pytest.mark.parametrize("damage", ["torn", "empty", "foreign", "code"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path, damage: str) -> None:
    storage = Storage(tmp_path)
    save_checkpoint(storage, RUN, TRIAL, {"step": 5, "value": torch.ones(1000)})
    content = storage.read(f"{FOLDER}/000000005.pt").to_pybytes()
    if damage == "code":
        torch.save({"step": 9, "value": Path("/")}, tmp_path / FOLDER / "000000009.pt")
    else:
        broken = {"torn": content[: len(content) // 2], "empty": b"", "foreign": b"hello"}[damage]
        storage.write(f"{FOLDER}/000000009.pt", broken)
    storage.write(f"{FOLDER}/000000007.pt.1a2b3c4d.tmp", content)
    assert [state["step"] for state in load_checkpoints(storage, RUN, TRIAL)] == [5]
    save_checkpoint(storage, RUN, TRIAL, {"step": 10})
    assert storage.names(FOLDER) == ["000000010.pt"]

"""Trials run to their end, at once or in pieces, and comparisons of what they leave to the bit."""

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from study.config import TrialConfig
from study.data import Tokens
from study.train import Report, train

NEVER = 1e9  # seconds between flushes: only an early one, and the last


def trace_of(reports: Iterable[Report]) -> dict[str, Any]:
    """The columns of all reports, one after the other; masked where a column was not sampled."""
    rows = [report.rows for report in reports if report.rows]
    names = dict.fromkeys(name for part in rows for name in part)
    return {
        name: np.ma.concatenate(
            [part.get(name, np.ma.masked_all(len(part["step"]), np.float32)) for part in rows]
        )
        for name in names
    }


def run(config: TrialConfig, data: Tokens, flush_seconds: float = NEVER) -> dict[str, Any]:
    """The trace of a trial that nobody disturbs."""
    return trace_of(train(config, data, flush_seconds=flush_seconds))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a checkpoint."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def reports_in_pieces(config: TrialConfig, data: Tokens, ends: set[int]) -> list[Report]:
    """The reports of a trial whose process dies after each of the steps `ends`."""
    reports: list[Report] = []
    state = None
    while not reports or reports[-1].status == "running":
        torch.manual_seed(12345)  # another process has another random state
        for report in train(config, data, state=state, flush_seconds=0):
            reports.append(report)
            if report.step in ends and report.status == "running":
                state = through_a_file(report.state())
                break
    return reports


def assert_same_bits(one: dict[str, Any], other: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """Two traces hold the same columns, gaps and bits; columns `but` may differ."""
    assert one.keys() == other.keys()
    for name in one.keys() - set(but):
        np.testing.assert_array_equal(np.ma.getmaskarray(one[name]), np.ma.getmaskarray(other[name]), name)
        first, second = (np.ma.filled(values.astype(np.float32), 0) for values in (one[name], other[name]))
        np.testing.assert_array_equal(first.view(np.int32), second.view(np.int32), name)


def assert_same_state(one: Any, other: Any) -> None:
    """Two states of a trial hold the same names, types and bits."""
    ours, theirs = _leaves(one), _leaves(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value.nan_to_num(7e7), theirs[name].nan_to_num(7e7)), name
        else:
            assert repr(value) == repr(theirs[name]), name


def _leaves(state: Any, name: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {key: leaf for part in state for key, leaf in _leaves(state[part], f"{name}/{part}").items()}
    if isinstance(state, list | tuple) and any(isinstance(item, dict) for item in state):
        return _leaves(dict(enumerate(state)), name)
    return {name: state}

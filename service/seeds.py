"""Means and bands over seeds, at equal steps and over the values that are finite there."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from service.options import Band
from service.sampling import Series

Row = dict[str, Any]


def aggregate(every: Sequence[Series], band: Band) -> tuple[Series, Series, Series, Series]:
    """Mean, lower and upper side of the band, and the places where any seed is not finite.

    One pass over the seeds, so that memory does not grow with them. NaN where no seed is finite.
    """
    longest = max(every, key=len).steps
    same = all(np.array_equal(one.steps, longest[: len(one)]) for one in every)
    steps = longest if same else np.unique(np.concatenate([one.steps for one in every]))
    count, total = np.zeros(len(steps)), np.zeros(len(steps))
    high, low = np.full(len(steps), -np.inf), np.full(len(steps), np.inf)
    broken = np.zeros(len(steps), bool)
    for places, values, finite in _aligned(every, steps, same):
        count[places] += finite
        total[places] += np.where(finite, values, 0.0)
        high[places] = np.where(finite, np.maximum(high[places], values), high[places])
        low[places] = np.where(finite, np.minimum(low[places], values), low[places])
        broken[places] |= ~finite
    none = count == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / count
    if band is Band.ci95:
        half = half_width(every, steps, same, mean, count)
        high, low = mean + half, mean - half
    high[none], low[none], mean[none] = np.nan, np.nan, np.nan
    return (
        Series(steps, mean),
        Series(steps, low),
        Series(steps, high),
        Series(steps[broken], mean[broken]),
    )


def half_width(
    every: Sequence[Series], steps: np.ndarray, same: bool, mean: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Half of the 95 % interval of the mean (Student's t over seeds); 0 where one seed is left."""
    from scipy.special import stdtrit

    squares = np.zeros(len(steps))
    for places, values, finite in _aligned(every, steps, same):
        squares[places] += np.where(finite, (values - mean[places]) ** 2, 0.0)
    freedom = np.maximum(count - 1, 1)
    half = stdtrit(freedom, 0.975) * np.sqrt(squares / freedom / np.maximum(count, 1))
    return np.where(count > 1, half, 0.0)


def _aligned(
    every: Sequence[Series], steps: np.ndarray, same: bool
) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """For every seed: where its steps lie among all, its values, and which of them are finite."""
    for one in every:
        places: Any = slice(0, len(one)) if same else np.searchsorted(steps, one.steps)
        yield places, one.values.astype(np.float64), np.isfinite(one.values)

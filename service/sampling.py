"""Downsampling that keeps the truth: min and max of every bucket, the ends, every non-finite place.

Which points of a trace are kept depends on nothing but the trace and the question. The extremes are
taken over finite values only (tsdownsample, Rust), since a NaN or an inf in a bucket would hide its
spike; the non-finite places are then added exactly, from the raw data. Cut the visible range first.
"""

from dataclasses import dataclass

import numpy as np
from tsdownsample import MinMaxDownsampler

NAMES = {"nan": "nan", "inf": "inf", "-inf": "-inf"}


@dataclass(frozen=True)
class Series:
    """One metric of one trial: steps (int) and values (float), both of shape (num_points,)."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def cut(self, first: float | None, last: float | None) -> "Series":
        """The points with first <= step <= last; None: no bound."""
        begin = 0 if first is None else int(np.searchsorted(self.steps, first, side="left"))
        end = len(self.steps) if last is None else int(np.searchsorted(self.steps, last, side="right"))
        return Series(self.steps[begin:end], self.values[begin:end])

    def sampled(self, num_points: int) -> "Series":
        """At most `num_points` points plus the non-finite ones; itself if it has no more than that."""
        if len(self) <= num_points:
            return self
        kept = sample(self.steps, self.values, num_points)
        return Series(self.steps[kept], self.values[kept])

    def nonfinite(self) -> "Series":
        """Only the points whose value is NaN or infinite."""
        places = np.flatnonzero(~np.isfinite(self.values))
        return Series(self.steps[places], self.values[places])


def sample(steps: np.ndarray, values: np.ndarray, num_points: int) -> np.ndarray:
    """Indices, ascending and without doubles, of the points to keep.

    steps: (n,) ascending; values: (n,) float; num_points >= 4: the bound on the finite ones. Buckets
    are equally wide in steps.
    """
    finite = np.isfinite(values)
    places = np.flatnonzero(finite)
    if len(places) > num_points:
        # Two points a bucket; two of the budget are for the ends, which need not be extremes.
        budget = (num_points - 2) // 2 * 2
        inside = np.ascontiguousarray(values[places])
        if budget < 4:  # one bucket, which the library refuses to make
            chosen = np.array([inside.argmin(), inside.argmax()])
        else:
            x = np.ascontiguousarray(steps[places])
            chosen = MinMaxDownsampler().downsample(x, inside, n_out=budget).astype(np.int64)
        places = places[np.concatenate(([0], chosen, [len(places) - 1]))]
    return np.unique(np.concatenate((places, np.flatnonzero(~finite))))


def name_of(value: float) -> str:
    """The word for a non-finite value: nan, inf or -inf."""
    return NAMES[str(float(value))]

"""Spikes: values that stand far from the rolling mean of a series, by two published definitions.

`SPIKE_SCORE` is the spike score of OLMo 2 (arXiv 2501.00656, section 3.2): the percentage of values
at least seven standard deviations away from the rolling average of the last 1,000 values. The paper
leaves three things open, settled here so: the deviation is taken over the same window, the window
ends with the value that is judged, and values before the first full window are not judged and not
counted. `OLMO_CORE` is what allenai/OLMo-core's StabilityMonitorCallback
counts: one-sided, six deviations, over the 128 values *before* the one that is judged.

Non-finite values are no spikes and enter no window; metrics.py counts them under their own name.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CHUNK = 16_000  # values worked on at once: what fits a core's cache is twice as fast


@dataclass(frozen=True)
class SpikeRule:
    """When a value is a spike."""

    window: int  # values in the rolling mean and in the population standard deviation
    deviations: float
    two_sided: bool
    includes_value: bool  # the window ends with the judged value; else with the one before it
    smallest_deviation: float  # at or below it the window counts as constant and nothing is a spike

    @property
    def needs(self) -> int:
        """The number of finite values from which on at least one is judged."""
        return self.window if self.includes_value else self.window + 1


SPIKE_SCORE = SpikeRule(1000, 7.0, two_sided=True, includes_value=True, smallest_deviation=0.0)
OLMO_CORE = SpikeRule(128, 6.0, two_sided=False, includes_value=False, smallest_deviation=1e-10)


def rolling_mean_deviation(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation of every full window of `values` [n] (finite).

    Returns two float64 arrays [n - window + 1]; entry i is of values[i : i + window]. Empty where
    n < window. O(n); relative error of a deviation below 1e-9 for any finite float32 values.
    """
    num_windows = max(0, len(values) - window + 1)
    mean, deviation = np.empty(num_windows), np.empty(num_windows)
    for begin, part_mean, part_deviation in _rolling_parts(np.asarray(values, np.float64), window):
        mean[begin : begin + len(part_mean)] = part_mean
        deviation[begin : begin + len(part_mean)] = part_deviation
    return mean, deviation


def _rolling_parts(values: np.ndarray, window: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    size = max(1, CHUNK // window) * window
    for begin in range(0, len(values) - window + 1, size):
        yield begin, *_rolling(values[begin : begin + size + window - 1], window)


def _rolling(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    # Differences of sums over the whole series would let one large spike drown every later window
    # in its rounding. So the series is cut into blocks as long as the window: each window is the
    # end of one block and the beginning of the next, and nothing outside of it enters its sums.
    num_values = len(values)
    num_blocks = -(-num_values // window)
    padded = np.pad(values, (0, num_blocks * window - num_values), mode="edge")
    blocks_BxW = padded.reshape(num_blocks, window)
    head_mean, head_square = (a.reshape(-1)[window - 1 : num_values] for a in _growing(blocks_BxW))
    tail_mean, tail_square = _growing(blocks_BxW[:, ::-1])
    # A window that is a whole block is all head: its tail is the same block and must not count twice.
    tail_square[:, -1] = 0.0
    num_windows = num_values - window + 1
    tail_mean, tail_square = (a[:, ::-1].reshape(-1)[:num_windows] for a in (tail_mean, tail_square))

    num_head = np.resize(np.roll(np.arange(1.0, window + 1), 1), num_windows)  # W, 1, 2, ..., W, 1, ...
    difference = head_mean - tail_mean
    mean = tail_mean + difference * (num_head / window)
    difference *= difference
    difference *= num_head * (1 - num_head / window)
    difference += head_square
    difference += tail_square
    difference /= window
    return mean, np.sqrt(difference, out=difference)


def _growing(values_BxW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Of the first 1, 2, ... W values of each row: the mean, and the summed squares of the distances
    # from it. Distances are first taken from the row's first value, which is always among those
    # summed: that bounds the cancellation by the number of values, whatever their sizes are.
    count = np.arange(1.0, values_BxW.shape[1] + 1)
    shifted = values_BxW - values_BxW[:, :1]
    mean = np.cumsum(shifted, axis=1)
    shifted *= shifted
    square = np.cumsum(shifted, axis=1, out=shifted)
    square -= mean**2 / count
    mean /= count
    mean += values_BxW[:, :1]
    return mean, np.maximum(square, 0.0, out=square)


def find_spikes(values: np.ndarray, rule: SpikeRule = SPIKE_SCORE) -> tuple[np.ndarray, int]:
    """Indices into `values` [n] of those that are spikes, and how many values were judged at all."""
    finite = np.asarray(values, np.float64)
    places = None
    if not np.isfinite(finite).all():
        places = np.flatnonzero(np.isfinite(finite))
        finite = finite[places]
    delay = rule.needs - 1  # from the beginning of a window to the value that it judges
    found = [np.empty(0, np.int64)]
    for begin, mean, deviation in _rolling_parts(finite, rule.window):
        judged = finite[begin + delay : begin + delay + len(mean)]
        distance = judged - mean[: len(judged)]  # the last window may have no value after it
        spread = deviation[: len(judged)]
        limit = rule.deviations * spread
        far = np.abs(distance) >= limit if rule.two_sided else distance > limit
        far &= spread > rule.smallest_deviation
        found.append(begin + delay + np.flatnonzero(far))
    spikes = np.concatenate(found)
    return (spikes if places is None else places[spikes]), max(0, len(finite) - delay)

"""From trials to the lines of a picture: arms, means and bands over seeds, smoothing, pixels.

Seeds are aggregated at equal steps, over the values that are finite there, before anything is
reduced; a seed that diverged is named by the label of its line. Where more steps than pixels are in
sight, a line becomes an Area (lowest and highest value of every column of pixels, so that a spike
one step wide stays) and the mean of every column. Non-finite places are kept exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.options import Axis, Band, PictureOptions
from service.sampling import Series
from service.seeds import Row, aggregate
from service.store import Recorded

Read = Callable[[Recorded], Series]


@dataclass(frozen=True)
class TrialTrace:
    """A trial's row and what was read of its trace."""

    row: Row
    recorded: Recorded


@dataclass(frozen=True)
class Arm:
    """Trials that make one line, and its words."""

    label: str
    trials: list[TrialTrace]


@dataclass(frozen=True)
class Mark:
    """Where a trial diverged: its x, and the last finite y before it."""

    x: float
    y: float


@dataclass(frozen=True)
class Area:
    """From `low` to `high`, NaN at gaps: at the places x (n,), or in the columns between x (n + 1,)."""

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass
class Curve:
    """One line of a picture, with x in the units of the axis."""

    label: str
    index: int  # which colour and marker
    x: np.ndarray
    y: np.ndarray
    strip: Area | None = None  # every step's range in a column of pixels, where y is only its mean
    band: Area | None = None  # over seeds
    smooth: tuple[np.ndarray, np.ndarray] | None = None
    marks: list[Mark] = field(default_factory=list)
    nonfinite_x: np.ndarray = field(default_factory=lambda: np.zeros(0))
    named: bool = True  # False for the further seeds of an arm, which share its entry of the legend

    def extremes(self) -> np.ndarray:
        """Every finite value that is drawn."""
        parts = [
            self.y,
            *(side for area in (self.strip, self.band) if area for side in (area.low, area.high)),
        ]
        values = np.concatenate(parts).astype(np.float64)
        return values[np.isfinite(values)]


def curves_of(arms: Sequence[Arm], read: Read, options: PictureOptions, num_columns: int) -> list[Curve]:
    """The lines of `read`'s metric: one an arm, or one a trial where no band is asked for."""
    curves: list[Curve] = []
    for index, arm in enumerate(arms):
        present = [trial for trial in arm.trials if len(read(trial.recorded))]
        if not present:
            continue
        groups = [[trial] for trial in present] if options.band is Band.none else [present]
        for number, trials in enumerate(groups):
            curve = _curve(trials, read, options, num_columns)
            curve.index, curve.named, curve.label = index, number == 0, label_of(arm, present)
            curves.append(curve)
    return curves


def label_of(arm: Arm, present: Sequence[TrialTrace]) -> str:
    """An arm's words for the legend: how many seeds it has, and which of them diverged where."""
    rows = [trial.row for trial in present]
    diverged = [row for row in rows if row["status"] == "diverged"]
    if len(rows) == 1:
        where = f" (diverged at step {diverged[0]['diverged_step']})" if diverged else ""
        return arm.label + where
    names = [f"{row['seed']} at step {row['diverged_step']}" for row in diverged[:3]]
    more = f" and {len(diverged) - 3} more" if len(diverged) > 3 else ""
    gone = f"; diverged: seed {', '.join(names)}{more}" if diverged else ""
    return f"{arm.label} (n={len(rows)}{gone})"


def scale_of(row: Row, axis: Axis) -> float:
    """What one step is on the x axis: 1, its tokens, or its seconds at the trial's mean pace."""
    if axis is Axis.tokens:
        sizes = (row["config"].get("batch_size"), row["config"].get("model", {}).get("context_length"))
        numbers = [size for size in sizes if isinstance(size, int | float) and size > 0]
        return float(np.prod(numbers)) if numbers else 1.0
    if axis is Axis.time:
        end = row["ended_at"] or row["heartbeat"]
        if row["started_at"] and end and end > row["started_at"] and row["step"]:
            return float((end - row["started_at"]) / row["step"])
        return 1.0 / row["steps_per_second"] if row["steps_per_second"] else 1.0
    return 1.0


def _curve(trials: Sequence[TrialTrace], read: Read, options: PictureOptions, num_columns: int) -> Curve:
    """One trial's line, or the mean and band of several."""
    scale = scale_of(trials[0].row, options.x)
    every = [read(trial.recorded) for trial in trials]
    low = high = None
    if len(every) == 1:
        line, broken = every[0], every[0].nonfinite()
    else:
        line, low, high, broken = aggregate(every, options.band)
    shown = line.cut(options.first, options.last)
    x = shown.steps * scale
    curve = Curve("", 0, x, shown.values)
    if len(shown) > 2 * num_columns:
        edges = np.linspace(x[0], x[-1], num_columns + 1)
        least, most, mean = columns(x, shown.values, edges)
        curve.x, curve.y = (edges[:-1] + edges[1:]) / 2, mean
        if low is not None and high is not None:
            least, _, _ = columns(x, low.cut(options.first, options.last).values, edges)
            _, most, _ = columns(x, high.cut(options.first, options.last).values, edges)
            curve.band = Area(edges, *joined(least, most))
        else:
            curve.strip = Area(edges, *joined(least, most))
    elif low is not None and high is not None:
        cut = low.cut(options.first, options.last), high.cut(options.first, options.last)
        curve.band = Area(x, cut[0].values, cut[1].values)
    if options.smooth > 1 and len(line):
        smooth = smoothed(line, options.smooth).cut(options.first, options.last).sampled(2 * num_columns)
        curve.smooth = (smooth.steps * scale, smooth.values)
    curve.nonfinite_x = broken.cut(options.first, options.last).steps * scale
    found = (
        _mark(trial.row, one.cut(options.first, options.last), scale)
        for trial, one in zip(trials, every, strict=True)
    )
    curve.marks = [mark for mark in found if mark]
    return curve


def columns(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least, greatest and mean finite y of every column between `edges` (n + 1,), NaN where none is.

    x: (m,) ascending, within the edges.
    """
    finite = np.isfinite(y)
    x, y = (x, y) if finite.all() else (x[finite], y[finite])
    starts = np.searchsorted(x, edges[:-1])
    counts = np.diff(np.append(starts, len(x)))
    filled = counts > 0
    results = [np.full(len(counts), np.nan) for _ in range(3)]
    if filled.any():
        at = starts[filled]
        results[0][filled] = np.minimum.reduceat(y, at)
        results[1][filled] = np.maximum.reduceat(y, at)
        results[2][filled] = np.add.reduceat(y.astype(np.float64), at) / counts[filled]
    return results[0], results[1], results[2]


def joined(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns stretched to touch their next neighbour, as the line between their points would."""
    low, high = low.copy(), high.copy()
    with np.errstate(invalid="ignore"):
        high[:-1] = np.where(high[:-1] < low[1:], low[1:], high[:-1])
        low[:-1] = np.where(low[:-1] > high[1:], high[1:], low[:-1])
    return low, high


def spikes_in(strip: Area, mean: np.ndarray, factor: float = 5.0, neighbours: int = 41) -> np.ndarray:
    """Columns that reach much farther from their mean than those around them: where to look."""
    reach = np.maximum(strip.high - mean, mean - strip.low)
    filled = np.flatnonzero(np.isfinite(reach))
    if len(filled) < neighbours:
        return filled[:0]
    padded = np.pad(reach[filled], neighbours // 2, mode="reflect")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, neighbours), axis=1)
    return filled[reach[filled] > factor * usual]


def _mark(row: Row, shown: Series, scale: float) -> Mark | None:
    """Where the trial diverged, if that is in sight."""
    step = row["diverged_step"]
    if row["status"] != "diverged" or step is None or not len(shown):
        return None
    before = shown.cut(None, step)
    finite = before.values[np.isfinite(before.values)]
    if not len(finite) or step > shown.steps[-1] + 1:
        return None
    return Mark(step * scale, float(finite[-1]))


def smoothed(series: Series, window: int) -> Series:
    """The trailing mean over `window` points, of the finite ones; a gap stays a gap.

    Sums are taken within blocks of one window, never as differences of running totals, in which a
    single huge value would drown all that follow it.
    """
    finite = np.isfinite(series.values)
    sums = _window_sums(np.where(finite, series.values, 0.0).astype(np.float64), window)
    counts = _window_sums(finite.astype(np.float64), window)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(finite, sums / counts, np.nan)
    return Series(series.steps, means)


def _window_sums(values: np.ndarray, window: int) -> np.ndarray:
    """Sums over the last `window` values at every place: the tail of one block and the head of the next."""
    window = max(1, min(window, len(values)))
    num_blocks = -(-len(values) // window) + 1
    padded = np.zeros((num_blocks, window))
    padded.reshape(-1)[window : window + len(values)] = values
    heads = padded.cumsum(axis=1).reshape(-1)
    tails = padded[:, ::-1].cumsum(axis=1)[:, ::-1].reshape(-1)
    ends = np.arange(window, window + len(values))
    starts = ends - window + 1
    return np.where(starts % window == 0, heads[ends], tails[starts] + heads[ends])

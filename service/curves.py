"""From trials to the lines of a picture: arms, means and bands over seeds, smoothing, sampling.

Seeds are aggregated at equal steps, over the values that are finite there, before anything is
sampled; a seed that diverged is named by the label of its line. Everything is sampled to the pixels
that it will be drawn on, by the rule of service.sampling, so that a spike one step wide stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.options import Axis, Band, PictureOptions
from service.sampling import Series
from service.store import Recorded

Row = dict[str, Any]
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


@dataclass
class Curve:
    """One line of a picture, sampled, with x in the units of the axis."""

    label: str
    index: int  # which colour and marker
    x: np.ndarray
    y: np.ndarray
    smooth: tuple[np.ndarray, np.ndarray] | None = None
    band: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None  # x, upper, x, lower
    marks: list[Mark] = field(default_factory=list)
    nonfinite_x: np.ndarray = field(default_factory=lambda: np.zeros(0))
    named: bool = True  # False for the further seeds of an arm, which share its entry of the legend


def curves_of(arms: Sequence[Arm], read: Read, options: PictureOptions, num_points: int) -> list[Curve]:
    """The lines of `read`'s metric: one an arm, or one a trial where no band is asked for."""
    curves: list[Curve] = []
    for index, arm in enumerate(arms):
        present = [trial for trial in arm.trials if len(read(trial.recorded))]
        if not present:
            continue
        if len(present) == 1 or options.band is Band.none:
            for number, trial in enumerate(present):
                curve = _single(trial, read, options, num_points)
                curve.index, curve.named = index, number == 0
                curve.label = label_of(arm, present)
                curves.append(curve)
        else:
            curve = _aggregate(present, read, options, num_points)
            curve.index, curve.label = index, label_of(arm, present)
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
        config, model = row["config"], row["config"].get("model", {})
        accumulation = config.get("accumulation", 1)
        values = (config.get("batch_size"), model.get("context_length"), accumulation)
        numbers = [value for value in values if isinstance(value, int | float) and value > 0]
        return float(np.prod(numbers)) if numbers else 1.0
    if axis is Axis.time:
        end = row["ended_at"] or row["heartbeat"]
        if row["started_at"] and end and end > row["started_at"] and row["step"]:
            return float((end - row["started_at"]) / row["step"])
        return 1.0 / row["steps_per_second"] if row["steps_per_second"] else 1.0
    return 1.0


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
    heads = padded.cumsum(axis=1)
    tails = padded[:, ::-1].cumsum(axis=1)[:, ::-1]
    ends = np.arange(window, window + len(values))
    starts = ends - window + 1
    flat_heads, flat_tails = heads.reshape(-1), tails.reshape(-1)
    return np.where(starts % window == 0, flat_heads[ends], flat_tails[starts] + flat_heads[ends])


def _single(trial: TrialTrace, read: Read, options: PictureOptions, num_points: int) -> Curve:
    scale = scale_of(trial.row, options.x)
    whole = read(trial.recorded)
    shown = whole.cut(options.first, options.last)
    kept = shown.sampled(num_points)
    curve = Curve("", 0, kept.steps * scale, kept.values)
    curve.nonfinite_x = shown.nonfinite().steps * scale
    if options.smooth > 1:
        smooth = smoothed(whole, options.smooth).cut(options.first, options.last).sampled(num_points)
        curve.smooth = (smooth.steps * scale, smooth.values)
    curve.marks = [mark for mark in [_mark(trial, shown, scale)] if mark]
    return curve


def _mark(trial: TrialTrace, shown: Series, scale: float) -> Mark | None:
    """Where the trial diverged, if that is in sight."""
    step = trial.row["diverged_step"]
    if trial.row["status"] != "diverged" or step is None or not len(shown):
        return None
    before = shown.cut(None, step)
    finite = before.values[np.isfinite(before.values)]
    if not len(finite) or step > shown.steps[-1] + 1:
        return None
    return Mark(step * scale, float(finite[-1]))


def _aggregate(trials: Sequence[TrialTrace], read: Read, options: PictureOptions, num_points: int) -> Curve:
    """Mean and band at equal steps, over the trials that are finite there."""
    scale = scale_of(trials[0].row, options.x)
    every = [read(trial.recorded) for trial in trials]
    longest = max(every, key=len).steps
    same = all(np.array_equal(one.steps, longest[: len(one)]) for one in every)
    steps = longest if same else np.unique(np.concatenate([one.steps for one in every]))
    count, total = np.zeros(len(steps)), np.zeros(len(steps))
    upper, lower = np.full(len(steps), -np.inf), np.full(len(steps), np.inf)
    broken = np.zeros(len(steps), bool)
    for places, values, finite in _aligned(every, steps, same):
        count[places] += finite
        total[places] += np.where(finite, values, 0.0)
        upper[places] = np.where(finite, np.maximum(upper[places], values), upper[places])
        lower[places] = np.where(finite, np.minimum(lower[places], values), lower[places])
        broken[places] |= ~finite
    none = count == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / count
    if options.band is Band.ci95:
        half = _half_width(every, steps, same, mean, count)
        upper, lower = mean + half, mean - half
    upper[none], lower[none], mean[none] = np.nan, np.nan, np.nan
    shown = Series(steps, mean).cut(options.first, options.last)
    kept = shown.sampled(num_points)
    high = Series(steps, upper).cut(options.first, options.last).sampled(num_points)
    low = Series(steps, lower).cut(options.first, options.last).sampled(num_points)
    curve = Curve("", 0, kept.steps * scale, kept.values)
    curve.band = (high.steps * scale, high.values, low.steps * scale, low.values)
    curve.nonfinite_x = Series(steps[broken], mean[broken]).cut(options.first, options.last).steps * scale
    if options.smooth > 1:
        smooth = smoothed(Series(steps, mean), options.smooth).cut(options.first, options.last)
        smooth = smooth.sampled(num_points)
        curve.smooth = (smooth.steps * scale, smooth.values)
    marks = (
        _mark(trial, one.cut(options.first, options.last), scale)
        for trial, one in zip(trials, every, strict=True)
    )
    curve.marks = [mark for mark in marks if mark]
    return curve


def _aligned(
    every: Sequence[Series], steps: np.ndarray, same: bool
) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    return [
        (
            slice(0, len(one)) if same else np.searchsorted(steps, one.steps),
            one.values.astype(np.float64),
            np.isfinite(one.values),
        )
        for one in every
    ]


def _half_width(
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

"""Lines that are computed from a trace's columns: clipped steps, update ratios by group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from service.curves import Arm, TrialTrace, curves_of, smoothed
from service.lines import draw_curves, draw_lines
from service.options import PictureOptions
from service.sampling import Series
from service.store import EMPTY, Recorded
from service.style import Sheet

if TYPE_CHECKING:
    from service.plots import Plot, Scene

CLIP_WINDOW = 100  # steps of the trailing mean if `smooth` asks for no other: that of fairseq's log


def draw_clipped_fraction(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """Trailing share of steps whose norm the clipping rule lowered."""
    window = options.smooth or CLIP_WINDOW
    titled = replace(plot, ylabel=f"Share of steps clipped (last {window})")
    plain = options.model_copy(update={"smooth": 0, "ymax": 1.05 if options.ymax is None else options.ymax})
    return draw_lines(scene, plain, titled, lambda recorded: smoothed(clipped(recorded), window))


def clipped(recorded: Recorded) -> Series:
    """1 where the norm was over the threshold, else 0; steps without a finite norm are left out.

    Rules that have no one threshold show only in the norm after them.
    """
    norm, threshold, after = (recorded[name] for name in ("grad_norm", "clip_threshold", "grad_norm_clipped"))
    finite = np.isfinite(norm.values)
    limits = _at(threshold, norm.steps)
    lowered = _at(after, norm.steps) < norm.values * (1 - 1e-6)
    flags = np.where(np.isnan(limits), lowered, norm.values > limits)
    known = finite & ~(np.isnan(limits) & np.isnan(_at(after, norm.steps)))
    return Series(norm.steps[known], flags[known].astype(np.float64))


def _at(series: Series, steps: np.ndarray) -> np.ndarray:
    """The values of a series at these steps, NaN where it has none."""
    values = np.full(len(steps), np.nan)
    if len(series) and len(steps):
        places = np.clip(np.searchsorted(series.steps, steps), 0, len(series) - 1)
        here = series.steps[places] == steps
        values[here] = series.values[places[here]]
    return values


def draw_update_ratio(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """||update|| / ||weights||: every group of one trial, or the largest group of several."""
    trials = [trial for arm in scene.arms for trial in arm.trials]
    if len(trials) == 1:
        arms = by_group(trials[0])
        sheet = Sheet(options, f"{plot.title} by group · {scene.name}")
        curves = curves_of(arms, lambda recorded: recorded["group"], options, sheet.num_columns)
        return draw_curves(sheet, curves, options, plot)
    titled = replace(plot, ylabel="Update / weight norm, largest group")
    return draw_lines(scene, options, titled, largest)


def by_group(trial: TrialTrace) -> list[Arm]:
    """A trial's groups, each as an arm of its own."""
    arms = []
    for name, series in trial.recorded.series.items():
        alone = Recorded({"group": series}, (), trial.recorded.last_step)
        arms.append(Arm(name.partition("/")[2], [TrialTrace(trial.row, alone)]))
    return arms


def largest(recorded: Recorded) -> Series:
    """At every sampled step the largest value of any group; NaN where one is not finite."""
    groups = [series for series in recorded.series.values() if len(series)]
    if not groups:
        return EMPTY
    steps = np.unique(np.concatenate([series.steps for series in groups]))
    table = np.stack([_at(series, steps) for series in groups])
    absent = np.stack([~np.isin(steps, series.steps) for series in groups])
    broken = (~np.isfinite(table) & ~absent).any(axis=0)
    highest = np.max(np.where(np.isfinite(table), table, -np.inf), axis=0)
    return Series(steps, np.where(broken, np.nan, highest))

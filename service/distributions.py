"""Where the norms of a run lie, and where they leap: a histogram, and the spikes of every trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from service.analysis import spikes_of
from service.curves import Arm, label_of, scale_of
from service.lines import label_steps, set_yscale, x_axis_of
from service.options import PictureOptions
from service.sampling import Series
from service.style import NUMBERS, Entry, Sheet, label_logs

if TYPE_CHECKING:
    from service.plots import Plot, Scene

NUM_BINS = 80


def draw_histogram(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """Share of steps by their norm (log), every arm a line; dotted: the median clip threshold."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    values = [_pooled(arm, "grad_norm", options) for arm in scene.arms]
    positive = [one[np.isfinite(one) & (one > 0)].astype(np.float64) for one in values]
    for index, arm in enumerate(scene.arms):
        if len(values[index]):
            odd = int((~np.isfinite(values[index])).sum())
            note = f"; {odd} steps inf or NaN" if odd else ""
            sheet.entries.append(Entry(label_of(arm, arm.trials) + note, *sheet.look(index)))
    axes = sheet.axes("Gradient norm (before clipping)", plot.ylabel)
    if not any(map(len, positive)):
        sheet.say(axes, plot.absent)
        return sheet
    low, high = min(one.min() for one in positive if len(one)), max(one.max() for one in positive if len(one))
    edges = np.geomspace(low / 1.02, high * 1.02, NUM_BINS + 1)
    heights = []
    for index, one in enumerate(positive):
        if not len(one):
            continue
        color, marker = sheet.look(index)
        share = np.histogram(one, edges)[0] / len(values[index])
        heights.append(share)
        axes.stairs(share, edges, color=color, linewidth=1.3)
        at = int(np.argmax(share))
        axes.plot(
            [np.sqrt(edges[at] * edges[at + 1])], [share[at]], marker=marker, color=color, markersize=7,
            markeredgecolor=sheet.theme.background, zorder=4,
        )  # fmt: skip
        limits = _pooled(scene.arms[index], "clip_threshold", options)
        limits = limits[np.isfinite(limits)]
        if len(limits) and low <= np.median(limits) <= high:
            axes.axvline(float(np.median(limits)), color=color, linestyle=":", linewidth=1.2)
    axes.set_xscale("log")
    label_logs(axes.xaxis, edges[0], edges[-1])
    axes.set_xlim(edges[0], edges[-1])
    axes.yaxis.set_major_formatter(NUMBERS)
    set_yscale(axes, np.concatenate(heights), options, plot)
    return sheet


def _pooled(arm: Arm, name: str, options: PictureOptions) -> np.ndarray:
    parts = [trial.recorded[name].cut(options.first, options.last).values for trial in arm.trials]
    return np.concatenate(parts) if parts else np.zeros(0)


def draw_spikes(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """A row a trial: where its norm (bars) and its loss (crosses) leap; the score of every arm."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    trials = [(index, trial) for index, arm in enumerate(scene.arms) for trial in arm.trials]
    lengths = [len(trial.recorded["grad_norm"]) for _, trial in trials]
    long_enough = any(length >= 1000 for length in lengths)
    found = [
        {name: _spikes(trial.recorded[name], long_enough, options) for name in ("grad_norm", "loss")}
        for _, trial in trials
    ]
    for index, arm in enumerate(scene.arms):
        mine = [spikes for (number, _), spikes in zip(trials, found, strict=True) if number == index]
        judged = sum(spikes["grad_norm"][1] for spikes in mine)
        count = sum(len(spikes["grad_norm"][0]) for spikes in mine)
        score = f"{count} spikes, {100 * count / judged:.2g} %" if judged else "too short to judge"
        sheet.entries.append(Entry(f"{arm.label}: {score}", *sheet.look(index)))
    if any(len(spikes["loss"][0]) for spikes in found):
        sheet.entries.append(Entry("spike in the loss", sheet.theme.text, "x", ""))
    rule = "7 deviations of 1,000 steps" if long_enough else "6 deviations of 128 steps"
    end = max(
        (float(trial.recorded.last_step) * scale_of(trial.row, options.x) for _, trial in trials), default=0
    )
    xlabel, divisor = x_axis_of(end, options.x)
    axes = sheet.axes(xlabel, f"Trial (spike: {rule})")
    if not any(lengths):
        sheet.say(axes, plot.absent)
        return sheet
    for place, ((index, trial), spikes) in enumerate(zip(trials, found, strict=True)):
        color, _ = sheet.look(index)
        y, scale = len(trials) - 1 - place, scale_of(trial.row, options.x)
        axes.plot([0, trial.recorded.last_step * scale], [y, y], color=color, linewidth=0.8, alpha=0.6)
        for name, marker, size in (("grad_norm", "|", 16), ("loss", "x", 5)):
            x = spikes[name][0] * scale
            axes.plot(
                x, np.full(len(x), y), ls="none", marker=marker, markersize=min(size, 300 / len(trials)),
                color=color if name == "grad_norm" else sheet.theme.text, markeredgewidth=1.3,
            )  # fmt: skip
    axes.set_ylim(-0.7, len(trials) - 0.3)
    scale = scale_of(trials[0][1].row, options.x)
    begin, stop = (options.first or 0) * scale, end if options.last is None else options.last * scale
    room = max(stop - begin, scale) * 0.015
    axes.set_xlim(begin - room, max(stop, begin) + room)
    every = -(-len(trials) // 20)
    places = range(0, len(trials), every)
    names = [str(trials[place][1].row["number"]) for place in places]
    axes.set_yticks([len(trials) - 1 - place for place in places], names)
    label_steps(axes, divisor, options.x)
    return sheet


def _spikes(series: Series, long_enough: bool, options: PictureOptions) -> tuple[np.ndarray, int]:
    """Steps of the spikes in sight, and how many steps were judged in the whole trace."""
    places, judged = spikes_of(series.values, long_enough)
    steps = series.steps[places]
    inside = steps >= (options.first or 0)
    if options.last is not None:
        inside &= steps <= options.last
    return steps[inside], judged

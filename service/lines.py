"""Lines against the step: raw values solid, markers thinned out, bands, smoothing, divergence marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import FuncFormatter

from service.curves import Curve, Read, curves_of
from service.options import Axis, PictureOptions, Scale
from service.style import NUMBERS, Entry, Sheet, Theme, look, number_format

if TYPE_CHECKING:
    from service.plots import Plot, Scene

NUM_MARKERS = 12
X_LABELS = {Axis.step: "Training step", Axis.tokens: "Tokens", Axis.time: "Time at mean pace"}


def draw_lines(scene: Scene, options: PictureOptions, plot: Plot, read: Read) -> Sheet:
    """One line an arm of what `read` takes from a trace."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    num_points = max(64, 2 * options.width)  # min and max for every column of pixels
    curves = curves_of(scene.arms, read, options, num_points)
    extra: list[Curve] = []
    if options.clipped and "grad_norm_clipped" in plot.columns:
        extra = curves_of(scene.arms, lambda recorded: recorded["grad_norm_clipped"], options, num_points)
    return draw_curves(sheet, curves, options, plot, extra)


def draw_curves(
    sheet: Sheet, curves: Sequence[Curve], options: PictureOptions, plot: Plot, extra: Sequence[Curve] = ()
) -> Sheet:
    """Curves with their legend; `extra` are the same arms after clipping, drawn paler."""
    for curve in curves:
        if curve.named:
            color, marker = look(sheet.theme, curve.index)
            sheet.entries.append(Entry(curve.label, color, marker))
    if extra:
        sheet.entries.append(Entry("paler: after clipping", sheet.theme.text, alpha=0.45))
    if any(len(curve.nonfinite_x) for curve in curves):
        num_places = sum(len(curve.nonfinite_x) for curve in curves)
        sheet.entries.append(Entry(f"| at the top: inf or NaN ({num_places})", sheet.theme.background))
    xlabel, divisor = x_axis(curves, options)
    axes = sheet.axes(xlabel, plot.ylabel)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_format(value / divisor)))
    axes.yaxis.set_major_formatter(NUMBERS)
    if not curves:
        sheet.say(axes, plot.absent)
        return sheet
    for curve in extra:
        color, _ = look(sheet.theme, curve.index)
        axes.plot(curve.x, curve.y, color=color, alpha=0.45, linewidth=sheet.theme.line_width)
    for number, curve in enumerate(curves):
        draw_curve(axes, sheet.theme, curve, number, len(curves))
    set_limits(axes, [*curves, *extra], options, plot)
    return sheet


def x_axis(curves: Sequence[Curve], options: PictureOptions) -> tuple[str, float]:
    """The x axis' words, and what its values are divided by: steps in thousands where they are many."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=0.0)
    label = X_LABELS[options.x]
    if options.x is Axis.time:
        for unit, seconds in (("hours", 3600.0), ("minutes", 60.0)):
            if end >= 2 * seconds:
                return f"{label} ({unit})", seconds
        return f"{label} (seconds)", 1.0
    for limit, word, divisor in ((1e10, "G", 1e9), (1e7, "M", 1e6), (1e4, "K", 1e3)):
        if end >= limit:
            return f"{label}s ({word})" if options.x is Axis.step else f"{label} ({word})", divisor
    return label, 1.0


def draw_curve(axes: Axes, theme: Theme, curve: Curve, number: int, num_curves: int) -> None:
    """One line with everything that belongs to it."""
    color, marker = look(theme, curve.index)
    if curve.band is not None:
        axes.add_collection(_band(curve.band, color), autolim=False)
    top = (curve.x, curve.y)
    if curve.smooth is not None:
        axes.plot(curve.x, curve.y, color=color, linewidth=theme.line_width * 0.8, alpha=0.35)
        top = curve.smooth
    marked = _marked(*top, number, num_curves)
    axes.plot(
        *top, color=color, linewidth=theme.line_width * (1.0 if curve.smooth is None else 1.8),
        marker=marker, markevery=marked, markersize=6.5, markeredgecolor=theme.background,
        markeredgewidth=0.7, solid_joinstyle="round", zorder=2.5,
    )  # fmt: skip
    lonely = _lonely(curve.y)
    if len(lonely):
        axes.plot(curve.x[lonely], curve.y[lonely], ls="none", marker=".", markersize=5, color=color)
    if len(curve.nonfinite_x):
        places = np.unique(curve.nonfinite_x)
        axes.plot(
            places, np.full(len(places), 0.985), ls="none", marker="|", markersize=8, color=color,
            transform=axes.get_xaxis_transform(), zorder=4,
        )  # fmt: skip
    for mark in curve.marks:
        axes.axvline(mark.x, color=color, linewidth=1.0, linestyle=":", zorder=2)
        axes.plot(
            [mark.x], [mark.y], marker="X", markersize=10, color=color, markeredgecolor=theme.text,
            markeredgewidth=0.9, zorder=5, ls="none",
        )  # fmt: skip


def _band(band: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], color: str) -> PolyCollection:
    """The area between an upper and a lower line that were sampled each by itself."""
    high_x, high, low_x, low = band
    above, below = np.isfinite(high), np.isfinite(low)
    vertices = np.concatenate(
        (np.column_stack((high_x, high))[above], np.column_stack((low_x, low))[below][::-1])
    )
    return PolyCollection([vertices], facecolors=color, alpha=0.22, linewidths=0, zorder=1.5)


def _marked(x: np.ndarray, y: np.ndarray, number: int, num_curves: int) -> list[int]:
    """Indices of the points with a marker: about 12, evenly over x, shifted from line to line."""
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= NUM_MARKERS:
        return finite.tolist()
    begin, end = float(x[0]), float(x[-1])
    shift = (number % max(num_curves, 1) + 0.5) / max(num_curves, 1)
    places = begin + (end - begin) * (np.arange(NUM_MARKERS) + shift) / NUM_MARKERS
    nearest = np.clip(np.searchsorted(x[finite], places), 0, len(finite) - 1)
    return np.unique(finite[nearest]).tolist()


def _lonely(y: np.ndarray) -> np.ndarray:
    """Indices of finite points with no finite neighbour: no line reaches them."""
    finite = np.concatenate(([False], np.isfinite(y), [False]))
    return np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])


def set_limits(axes: Axes, curves: Sequence[Curve], options: PictureOptions, plot: Plot) -> None:
    """The visible range: all that is finite, from 0 where the plot says so, or what was asked for."""
    scale = options.yscale.value if options.yscale is not None else plot.yscale
    parts = [curve.y for curve in curves] + [
        side for c in curves if c.band for side in (c.band[1], c.band[3])
    ]
    values = np.concatenate(parts).astype(np.float64)
    values = values[np.isfinite(values)]
    if scale == Scale.log:
        values = values[values > 0]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if scale == Scale.log:
        low, high = (low / 1.15, high * 1.15) if len(values) else (0.1, 1.0)
    elif plot.from_zero and low >= 0:
        low, high = 0.0, high * 1.06
    else:
        room = (high - low) * 0.05 or max(abs(high), 1e-3) * 0.05
        low, high = low - room, high + room
    low = options.ymin if options.ymin is not None else low
    high = options.ymax if options.ymax is not None else high
    if not low < high:  # only one end was asked for, beyond all data
        low, high = (
            (low, low + max(abs(low), 1.0))
            if options.ymin is not None
            else (high - max(abs(high), 1.0), high)
        )
    if scale == Scale.log:
        low = low if low > 0 else high / 10
        axes.set_yscale("log")
    elif scale == Scale.symlog:
        positive = np.abs(values[values != 0])
        axes.set_yscale("symlog", linthresh=float(np.quantile(positive, 0.05)) if len(positive) else 1.0)
    if scale != Scale.linear:
        axes.yaxis.set_major_formatter(NUMBERS)
    axes.set_ylim(low, high)
    xs = [curve.x for curve in curves if len(curve.x)]
    begin, end = min(float(x[0]) for x in xs), max(float(x[-1]) for x in xs)
    room = (end - begin) * 0.015 or 1.0
    axes.set_xlim(begin - room, end + room)

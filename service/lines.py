"""Lines against the step: markers thinned out, bands, smoothing, divergence marked, spikes kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator

from service.curves import Area, Curve, Read, curves_of, spikes_in
from service.options import Axis, PictureOptions, Scale
from service.style import NUMBERS, Entry, Sheet, label_logs, number_format
from service.themes import Theme, look

if TYPE_CHECKING:
    from service.plots import Plot, Scene

NUM_MARKERS = 12
X_LABELS = {Axis.step: "Training step", Axis.tokens: "Tokens", Axis.time: "Time at mean pace"}
STRIP_ALPHA, BAND_ALPHA = 0.42, 0.24


def draw_lines(scene: Scene, options: PictureOptions, plot: Plot, read: Read) -> Sheet:
    """One line an arm of what `read` takes from a trace."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    curves = curves_of(scene.arms, read, options, sheet.num_columns)
    extra: list[Curve] = []
    if options.clipped and "grad_norm_clipped" in plot.columns:
        extra = curves_of(
            scene.arms, lambda recorded: recorded["grad_norm_clipped"], options, sheet.num_columns
        )
    return draw_curves(sheet, curves, options, plot, extra)


def draw_curves(
    sheet: Sheet, curves: Sequence[Curve], options: PictureOptions, plot: Plot, extra: Sequence[Curve] = ()
) -> Sheet:
    """Curves with their legend; `extra` are the same arms after clipping, drawn dashed."""
    sheet.entries = legend_of(sheet.theme, curves, bool(extra))
    xlabel, divisor = x_axis(curves, options)
    axes = sheet.axes(xlabel, plot.ylabel)
    label_steps(axes, divisor, options.x)
    axes.yaxis.set_major_formatter(NUMBERS)
    if not any(len(curve.x) for curve in curves):
        sheet.say(axes, "nothing was recorded in this range" if curves else plot.absent)
        return sheet
    set_limits(axes, [*curves, *extra], options, plot)
    # The calm over the rough: a line that moves little is not buried under one that fills its column.
    rough = sorted(range(len(curves)), key=lambda number: -_roughness(curves[number]))
    for rank, number in enumerate(rough):
        draw_curve(axes, sheet.theme, curves[number], (number, len(curves)), 2 + rank / len(curves))
    for curve in extra:
        color, _ = sheet.look(curve.index)
        axes.plot(curve.x, curve.y, color=color, linestyle=(0, (4, 2)), linewidth=1.0, zorder=3.5)
    return sheet


def legend_of(theme: Theme, curves: Sequence[Curve], clipped: bool) -> list[Entry]:
    """An entry a line, and one for everything that needs words."""
    entries = [Entry(curve.label, *look(theme, curve.index)) for curve in curves if curve.named]
    if clipped:
        entries.append(Entry("after clipping", theme.text, linestyle="--"))
    if any(curve.strip is not None and curve.smooth is None for curve in curves):
        entries.append(Entry("range and mean of the steps in a pixel", theme.text, patch=STRIP_ALPHA))
    num_places = sum(len(curve.nonfinite_x) for curve in curves)
    if num_places:
        entries.append(Entry(f"inf or NaN ({num_places} step{'s' * (num_places > 1)})", theme.text, "|", ""))
    return entries


def x_axis(curves: Sequence[Curve], options: PictureOptions) -> tuple[str, float]:
    """The x axis' words, and what its values are divided by: steps in thousands where they are many."""
    return x_axis_of(max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=0.0), options.x)


def label_steps(axes: Axes, divisor: float, axis: Axis) -> None:
    """Words of the x axis' ticks; steps have no fractions."""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_format(value / divisor)))
    locator = axes.xaxis.get_major_locator()
    if axis is Axis.step and isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)


def x_axis_of(end: float, axis: Axis) -> tuple[str, float]:
    """The same, for an axis that ends at `end`."""
    label = X_LABELS[axis]
    if axis is Axis.time:
        for unit, seconds in (("hours", 3600.0), ("minutes", 60.0)):
            if end >= 2 * seconds:
                return f"{label} ({unit})", seconds
        return f"{label} (seconds)", 1.0
    for limit, word, divisor in ((1e10, "G", 1e9), (1e7, "M", 1e6), (1e4, "K", 1e3)):
        if end >= limit:
            return f"{label}s ({word})" if axis is Axis.step else f"{label} ({word})", divisor
    return label, 1.0


def draw_curve(axes: Axes, theme: Theme, curve: Curve, place: tuple[int, int], zorder: float) -> None:
    """One line with everything that belongs to it; `place`: which of how many."""
    color, marker = look(theme, curve.index)
    faded = 0.45 if curve.smooth is not None else 1.0
    width = theme.line_width
    if curve.band is not None:
        axes.add_collection(_filled(axes, curve.band, color, BAND_ALPHA, zorder - 1), autolim=False)
    if curve.strip is not None:
        strip = _filled(axes, curve.strip, color, STRIP_ALPHA * faded, zorder)
        axes.add_collection(strip, autolim=False)
        odd = spikes_in(curve.strip, curve.y)
        if len(odd):
            spikes: dict[str, Any] = {"colors": color, "linewidth": theme.line_width * 0.9, "zorder": 2.97}
            axes.vlines(curve.x[odd], curve.strip.low[odd], curve.strip.high[odd], **spikes)
        width *= 1.3
    top = (curve.x, curve.y)
    if curve.smooth is not None:
        if curve.strip is None:
            axes.plot(curve.x, curve.y, color=color, linewidth=width * 0.8, alpha=0.35, zorder=zorder)
        top, width = curve.smooth, theme.line_width * 1.7
    axes.plot(*top, color=color, linewidth=width, solid_joinstyle="bevel", zorder=zorder)
    marked = _marked(*top, place) if curve.named else []
    axes.plot(
        top[0][marked], top[1][marked], ls="none", marker=marker, color=color, markersize=6.5,
        markeredgecolor=theme.background, markeredgewidth=0.7, zorder=3,
    )  # fmt: skip
    lonely = _lonely(curve.y)
    if len(lonely):
        style: dict[str, Any] = {
            "ls": "none",
            "marker": ".",
            "markersize": 5,
            "color": color,
            "zorder": zorder,
        }
        axes.plot(curve.x[lonely], curve.y[lonely], **style)
    if len(curve.nonfinite_x):
        places = np.unique(curve.nonfinite_x)
        axes.plot(
            places, np.full(len(places), 0.985 - 0.03 * (curve.index % 12)), ls="none", marker="|",
            markersize=9, markeredgewidth=1.4, color=color, transform=axes.get_xaxis_transform(), zorder=4,
        )  # fmt: skip
    for mark in curve.marks:
        axes.axvline(mark.x, color=color, linewidth=1.0, linestyle=":", zorder=1.9)
        axes.plot(
            [mark.x], [mark.y], marker="X", markersize=10, color=color, markeredgecolor=theme.text,
            markeredgewidth=0.9, zorder=5, ls="none",
        )  # fmt: skip


def _filled(axes: Axes, area: Area, color: str, alpha: float, zorder: float) -> PolyCollection:
    """An area as polygons, one for every stretch without a gap, nowhere thinner than a line."""
    finite = np.isfinite(area.low) & np.isfinite(area.high)
    bounds = np.flatnonzero(np.diff(np.concatenate(([0], finite.view(np.int8), [0]))))
    stepped = len(area.x) > len(area.low)
    low, high = _padded(axes, area.low, -0.5), _padded(axes, area.high, 0.5)
    polygons = []
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        if stepped:
            x = np.repeat(area.x[begin : end + 1], 2)[1:-1]
            sides = np.repeat(high[begin:end], 2), np.repeat(low[begin:end], 2)
        else:
            x, sides = area.x[begin:end], (high[begin:end], low[begin:end])
        polygons.append(
            np.column_stack((np.concatenate((x, x[::-1])), np.concatenate((sides[0], sides[1][::-1]))))
        )
    return PolyCollection(polygons, facecolors=color, alpha=alpha, linewidths=0, zorder=zorder)


def _padded(axes: Axes, y: np.ndarray, points: float) -> np.ndarray:
    """y moved up by so many points on the page, whatever the axis' scale; NaN stays."""
    bottom, top = axes.get_ylim()
    transform = axes.transData
    spread = top - bottom if axes.get_yscale() == "linear" else 0.0
    inside = np.clip(y, bottom - spread, top + spread)  # what is far outside may not overflow the page
    place = transform.transform(np.column_stack((np.zeros(len(y)), inside)))
    place[:, 1] += points * axes.figure.dpi / 72
    return transform.inverted().transform(place)[:, 1]


def _roughness(curve: Curve) -> float:
    if curve.strip is not None:
        return float(np.nanmean(curve.strip.high - curve.strip.low)) if len(curve.y) else 0.0
    finite = curve.y[np.isfinite(curve.y)].astype(np.float64)
    return float(np.abs(np.diff(finite)).mean()) if len(finite) > 1 else 0.0


def _marked(x: np.ndarray, y: np.ndarray, place: tuple[int, int]) -> list[int]:
    """Indices of the points with a marker: about 12, evenly over x, shifted from line to line."""
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= NUM_MARKERS:
        return finite.tolist()
    begin, end = float(x[0]), float(x[-1])
    shift = (place[0] + 0.5) / place[1]
    places = begin + (end - begin) * (np.arange(NUM_MARKERS) + shift) / NUM_MARKERS
    nearest = np.clip(np.searchsorted(x[finite], places), 0, len(finite) - 1)
    return np.unique(finite[nearest]).tolist()


def _lonely(y: np.ndarray) -> np.ndarray:
    """Indices of finite points with no finite neighbour: no line reaches them."""
    finite = np.concatenate(([False], np.isfinite(y), [False]))
    return np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])


def set_limits(axes: Axes, curves: Sequence[Curve], options: PictureOptions, plot: Plot) -> None:
    """The visible range: all that is finite, from 0 where the plot says so, or what was asked for."""
    values = np.concatenate([curve.extremes() for curve in curves])
    set_yscale(axes, values, options, plot)
    xs = [curve.x for curve in curves if len(curve.x)]
    begin, end = min(float(x[0]) for x in xs), max(float(x[-1]) for x in xs)
    room = (end - begin) * 0.015 or 1.0
    axes.set_xlim(begin - room, end + room)


def set_yscale(axes: Axes, values: np.ndarray, options: PictureOptions, plot: Plot) -> None:
    """Scale and limits of the y axis, for finite `values`."""
    scale = options.yscale if options.yscale is not None else Scale(plot.yscale)
    if scale is Scale.log:
        values = values[values > 0]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1, 1.0)
    if scale is Scale.log:
        low, high = low / 1.15, high * 1.15
    elif plot.from_zero and low >= 0:
        low, high = 0.0, high * 1.06 or 1.0
    else:
        room = (high - low) * 0.05 or max(abs(high), 1e-3) * 0.05
        low, high = low - room, high + room
    low = options.ymin if options.ymin is not None else low
    high = options.ymax if options.ymax is not None else high
    if not low < high:  # only one end was asked for, beyond all data
        spread = max(abs(low), abs(high), 1e-3)
        low, high = (low, low + spread) if options.ymin is not None else (high - spread, high)
    if scale is Scale.log:
        low = low if 0 < low < high else high / 10
        axes.set_yscale("log")
    elif scale is Scale.symlog:
        sizes = np.abs(values[values != 0])
        axes.set_yscale("symlog", linthresh=float(np.quantile(sizes, 0.05)) if len(sizes) else 1.0)
    if scale is Scale.log:
        label_logs(axes.yaxis, low, high)
    elif scale is Scale.symlog:
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(NUMBERS)
        ticks = np.asarray(axes.yaxis.get_majorticklocs())
        if ((ticks >= low) & (ticks <= high)).sum() < 3:  # less than a decade or two in sight
            axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_ylim(low, high)

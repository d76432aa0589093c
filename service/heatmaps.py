"""Layers x steps as colour: where in the depth a gradient grows, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm

from service.curves import TrialTrace, columns, scale_of
from service.lines import label_steps, x_axis_of
from service.options import PictureOptions
from service.problems import bad_parameter
from service.style import Sheet, label_logs

if TYPE_CHECKING:
    from service.plots import Plot, Scene

MAX_PANELS = 12
BROKEN = "#e0245e"


def draw_layers(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """A panel an arm (its first trial); colour is the log of a group's norm, its largest in the pixel."""
    panels = [
        (arm.label, arm.trials[0]) for arm in scene.arms if arm.trials and arm.trials[0].recorded.series
    ]
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    if not panels:
        sheet.say(sheet.axes("Training step", plot.ylabel), plot.absent)
        return sheet
    if len(panels) > MAX_PANELS:
        raise bad_parameter(
            "trials", f"{len(panels)} panels; limit: {MAX_PANELS}; narrow them by trials or where"
        )
    images = [image_of(trial, options, max(16, sheet.num_columns)) for _, trial in panels]
    values = np.concatenate([image[np.isfinite(image) & (image > 0)] for _, image, _ in images])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1, 1.0)
    norm = LogNorm(low, high if high > low else low * 10)
    from matplotlib import colormaps

    colormap = colormaps[sheet.theme.colormap].with_extremes(bad=BROKEN)
    boxes = sheet.boxes(len(panels))
    for (label, trial), image, axes in zip(panels, images, boxes, strict=True):
        _panel(sheet, axes, label, trial, image, norm, colormap)
    _colorbar(sheet, norm, colormap)
    return sheet


def image_of(
    trial: TrialTrace, options: PictureOptions, num_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges on the x axis (n + 1,), norms (groups, n) and where one is not finite (groups, n)."""
    scale = scale_of(trial.row, options.x)
    cut = [series.cut(options.first, options.last) for series in trial.recorded.series.values()]
    steps = np.unique(np.concatenate([series.steps for series in cut])) if cut else np.zeros(0)
    if not len(steps):
        return np.array([0.0, 1.0]), np.full((len(cut), 1), np.nan), np.zeros((len(cut), 1), bool)
    width = max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1
    begin, end = float(steps[0]), float(steps[-1]) + width
    count = int(min(num_columns, max(1, round((end - begin) / width))))
    edges = np.linspace(begin, end, count + 1)
    image = np.stack([columns(series.steps, series.values, edges)[1] for series in cut])
    broken = np.zeros(image.shape, bool)
    for row, series in enumerate(cut):
        odd = series.nonfinite().steps
        broken[row, np.clip(np.searchsorted(edges, odd, side="right") - 1, 0, count - 1)] = True
    return edges * scale, image, broken


def _panel(
    sheet: Sheet, axes: Axes, label: str, trial: TrialTrace, image: tuple[np.ndarray, ...], norm: LogNorm,
    colormap: Colormap,
) -> None:  # fmt: skip
    edges, values, broken = image
    with np.errstate(invalid="ignore"):
        colors = colormap(norm(np.clip(values, norm.vmin, norm.vmax)))
    colors[~np.isfinite(values)] = 0.0
    colors[broken] = (*[int(BROKEN[k : k + 2], 16) / 255 for k in (1, 3, 5)], 1.0)
    axes.imshow(
        colors, origin="lower", aspect="auto", interpolation="nearest",
        extent=(edges[0], edges[-1], -0.5, len(values) - 0.5),
    )  # fmt: skip
    names = [name.partition("/")[2] for name in trial.recorded.series]
    xlabel, divisor = x_axis_of(float(edges[-1]), sheet.options.x)
    sheet.dress(axes, xlabel, "")
    axes.grid(False)
    label_steps(axes, divisor, sheet.options.x)
    room = max(1, int(axes.get_position().height * sheet.options.height / (11 * sheet.point)))
    every = -(-len(names) // room)
    axes.set_yticks(range(0, len(names), every), [sheet.fitted_to(name, 8, 68) for name in names[::every]])
    axes.tick_params(axis="y", labelsize=8)
    # Over the names of the layers too, which leaves words more room than the panel alone.
    box = axes.get_window_extent()
    left = box.x0 - 70 * sheet.point
    text = sheet.fitted_to(label, 9, (box.x1 - left) / sheet.point)
    sheet.write((left + box.x1) / 2, box.y1 + 4 * sheet.point, text, 9, "center")


def _colorbar(sheet: Sheet, norm: LogNorm, colormap: Colormap) -> None:
    from matplotlib.cm import ScalarMappable

    point, options = sheet.point, sheet.options
    axes = sheet.figure.add_axes(
        (1 - 52 * point / options.width, 46 * point / options.height, 10 * point / options.width,
         1 - 92 * point / options.height)
    )  # fmt: skip
    bar = sheet.figure.colorbar(ScalarMappable(norm, colormap), cax=axes)
    bar.outline.set_visible(False)
    label_logs(axes.yaxis, float(norm.vmin or 1), float(norm.vmax or 1))
    axes.tick_params(labelsize=8, colors=sheet.theme.text, which="both", length=2)
    x = options.width - 47 * point
    sheet.write(x, options.height - 34 * point, "norm", 8, "center")
    sheet.write(x, 24 * point, "inf, NaN", 8, "center", color=BROKEN)

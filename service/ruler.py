"""Ticks, grid and labels of a pair of axes, drawn at once.

matplotlib's own axis makes five artists of every tick, which cost more than the lines of a picture.
Here the places and words come from its locators and formatters as ever, and are drawn as two
collections of lines and one line of words each.
"""

import warnings
from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection

from service.lettering import Words

TICK_POINTS, LABEL_POINTS = 9.0, 10.0
Segment = tuple[tuple[float, float], tuple[float, float]]


def rule(
    axes: Axes, xlabel: str, ylabel: str, colors: tuple[str, str], write: Callable[[Words], None]
) -> None:
    """Draw what an axis has, for its limits and scales as they are now, and hide matplotlib's.

    `colors`: of the text and of the grid.
    """
    color, faint = colors
    point = axes.figure.dpi / 72
    box = axes.get_window_extent()
    grid: list[Segment] = []
    marks: list[Segment] = [((0, 0), (1, 0)), ((0, 0), (0, 1))]
    for share, label, major in ticks(axes, axes.xaxis, 0):
        length = (3 if major else 1.8) * point / box.height
        marks.append(((share, 0), (share, -length)))
        grid += [((share, 0), (share, 1))] if major else []
        x = box.x0 + share * box.width
        write(Words(x, box.y0 - 6 * point, label, TICK_POINTS - (not major), color, "center", "top"))
    for share, label, major in ticks(axes, axes.yaxis, 1):
        length = (3 if major else 1.8) * point / box.width
        marks.append(((0, share), (-length, share)))
        grid += [((0, share), (1, share))] if major else []
        y = box.y0 + share * box.height
        write(Words(box.x0 - 6 * point, y, label, TICK_POINTS - (not major), color, "right", "center"))
    middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    write(Words(middle[0], box.y0 - 21 * point, xlabel, LABEL_POINTS, color, "center", "top"))
    write(Words(11 * point, middle[1], ylabel, LABEL_POINTS, color, "center", "center", upright=True))
    for lines, shade, width, order in ((grid, faint, 0.6, 0.5), (marks, color, 0.8, 2.4)):
        drawn = LineCollection(lines, colors=shade, linewidths=width, zorder=order, clip_on=False)
        drawn.set_transform(axes.transAxes)
        axes.add_collection(drawn, autolim=False)
    axes.set_axis_off()


def ticks(axes: Axes, axis: Axis, dimension: int) -> Iterator[tuple[float, str, bool]]:
    """Every tick in sight: its share of the axis (0 to 1), its words, whether it is a major one."""
    transform = axes.transScale + axes.transLimits
    taken: set[float] = set()
    for major in (True, False):
        locator = axis.get_major_locator() if major else axis.get_minor_locator()
        formatter = axis.get_major_formatter() if major else axis.get_minor_formatter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ticks that nobody would see
            values = np.atleast_1d(np.asarray(locator(), np.float64))
        begin, end = sorted(axis.get_view_interval())
        values = values[(values >= begin) & (values <= end)]
        points = np.zeros((len(values), 2))
        points[:, dimension] = values
        points[:, 1 - dimension] = (axes.get_xlim(), axes.get_ylim())[1 - dimension][0]
        shares = transform.transform(points)[:, dimension] if len(values) else values
        for share, label in zip(shares, formatter.format_ticks(values.tolist()), strict=True):
            if round(float(share), 6) not in taken:
                taken.add(round(float(share), 6))
                yield float(share), label, major

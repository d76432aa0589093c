"""How pictures look: themes, the cycle of lines, and a sheet with room for title, axes and legend.

Figure objects only, never pyplot: its figures live until closed, and its current figure is global."""

import io
import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from service.lettering import Vertical, Words, add_text, blend, width_of
from service.options import Kind, PictureOptions
from service.ruler import LABEL_POINTS, TICK_POINTS, rule
from service.themes import THEMES, look

matplotlib.rcParams["svg.hashsalt"] = "gradnorm"  # the same picture is the same bytes

Horizontal = Literal["left", "center", "right"]
RUN_LENGTHS = zlib.Z_RLE
TITLE_POINTS, LEGEND_POINTS = 12.0, 9.0
ROW_POINTS = 15.0  # height of a row of the legend
HANDLE_POINTS = 30.0  # length of a line in the legend
LEFT_POINTS, RIGHT_POINTS = 56.0, 14.0  # beside the axes


@dataclass(frozen=True)
class Entry:
    """One entry of the legend: what a line looks like, and its words."""

    label: str
    color: str
    marker: str = ""
    linestyle: Literal["-", "--", ""] = "-"
    patch: float = 0.0  # opacity of an area behind the line


class Sheet:
    """A figure of the asked size: title above, axes, and the legend below, where it hides nothing."""

    def __init__(self, options: PictureOptions, title: str) -> None:
        self.options = options
        self.theme = THEMES[options.theme.value]
        self.point = options.dpi / 72
        self.figure = Figure(
            figsize=(options.width / options.dpi, options.height / options.dpi),
            dpi=options.dpi,
            facecolor=self.theme.background,
        )
        self.canvas = FigureCanvasAgg(self.figure)
        self.title = self.fitted(options.title if options.title is not None else title, TITLE_POINTS, 24)
        self.entries: list[Entry] = []
        self.words: list[Words] = []
        self.ruled: tuple[Axes, str, str] | None = None

    def width_of(self, text: str, points: float) -> float:
        """Pixels that a line of text takes."""
        return width_of(text, points) * self.point

    def look(self, index: int) -> tuple[str, str]:
        """Colour and marker of the line `index`."""
        return look(self.theme, index)

    @property
    def num_columns(self) -> int:
        """Columns of pixels that lines are drawn on."""
        return max(32, int((self.options.width - (LEFT_POINTS + RIGHT_POINTS) * self.point) / 1.03))

    def fitted(self, text: str, points: float, margin: float) -> str:
        """`text` on one line, cut with an ellipsis where the picture is narrower than it."""
        return self.fitted_to(text, points, self.options.width / self.point - margin)

    def fitted_to(self, text: str, points: float, width: float) -> str:
        """`text` on one line of at most `width` points."""
        text = " ".join(text.split())
        room = width * self.point
        if not text or self.width_of(text, points) <= room:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self.width_of(text[:middle] + "…", points) <= room:
                low = middle
            else:
                high = middle - 1
        return text[:low].rstrip() + "…"

    def axes(self, xlabel: str, ylabel: str) -> Axes:
        """The one pair of axes; call after `entries` are known, which need room below."""
        rows = self._legend_rows()
        options, point = self.options, self.point
        left, right = LEFT_POINTS * point, RIGHT_POINTS * point
        bottom, top = (
            (40 + ROW_POINTS * len(rows) + (4 if rows else 0)) * point,
            (32 if self.title else 12) * point,
        )
        left_share, bottom_share = left / options.width, min(bottom / options.height, 0.7)
        share = max(1 - bottom_share - top / options.height, 0.1)
        axes = self.figure.add_axes((left_share, bottom_share, 1 - left_share - right / options.width, share))
        axes.set_autoscale_on(False)  # every plot knows its limits
        axes.patch.set_visible(False)
        self.set_locators(axes)
        self.ruled = (axes, xlabel, self.fitted_to(ylabel, LABEL_POINTS, share * options.height / point + 40))
        self._draw_title()
        self._draw_legend(rows)
        return axes

    def boxes(self, number: int) -> list[Axes]:
        """A grid of panels, with room at the right for a scale of colours."""
        self._draw_title()
        across = 1 if number == 1 else 2 if number <= 4 else 3 if number <= 9 else 4
        down = -(-number // across)
        width, height = self.options.width / self.point, self.options.height / self.point  # in points
        box = ((width - 64) / across, (height - 34 - 6) / down)
        panels = []
        for place in range(number):
            left, row = (place % across) * box[0] + 78, place // across
            bottom = height - 34 - (row + 1) * box[1] + 34
            shape = (
                left / width,
                bottom / height,
                max(box[0] - 88, 20) / width,
                max(box[1] - 54, 12) / height,
            )
            panels.append(self.figure.add_axes(shape))
        return panels

    def _draw_title(self) -> None:
        if self.title:
            y = self.options.height - 12 * self.point
            self.write(self.options.width / 2, y, self.title, TITLE_POINTS, "center", "top")

    def dress(self, axes: Axes, xlabel: str, ylabel: str) -> None:
        """Labels, grid and colours of a pair of axes."""
        theme, point = self.theme, self.point
        axes.set_facecolor(theme.background)
        axes.set_xlabel(xlabel, fontsize=LABEL_POINTS, color=theme.text, labelpad=3, parse_math=False)
        room = axes.get_position().height * self.options.height / point
        axes.set_ylabel(
            self.fitted_to(ylabel, LABEL_POINTS, max(room + 20, 40)),
            fontsize=LABEL_POINTS,
            color=theme.text,
            labelpad=4,
            parse_math=False,
        )
        axes.tick_params(labelsize=TICK_POINTS, colors=theme.text, length=3, width=0.8)
        axes.tick_params(which="minor", labelsize=TICK_POINTS - 1, colors=theme.text, length=2)
        axes.grid(True, color=theme.faint, linewidth=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(theme.text)
            spine.set_linewidth(0.8)
        self.set_locators(axes)

    def set_locators(self, axes: Axes) -> None:
        """As many round values as there is room for."""
        box = axes.get_position()
        sizes = (box.width * self.options.width, 62), (box.height * self.options.height, 40)
        for axis, (size, room) in zip((axes.xaxis, axes.yaxis), sizes, strict=True):
            nbins = int(max(2, min(10, size / (room * self.point))))
            axis.set_major_locator(MaxNLocator(nbins=nbins, steps=[1, 2, 5, 10]))

    def write(
        self, x: float, y: float, text: str, points: float, horizontal: Horizontal = "left",
        vertical: Vertical = "baseline", color: str = "",
    ) -> None:  # fmt: skip
        """Text at a place of the page, in pixels from the left and from the bottom."""
        self.words.append(Words(x, y, text, points, color or self.theme.text, horizontal, vertical))

    def say(self, axes: Axes, text: str) -> None:
        """A sentence in the middle of axes that have nothing to show."""
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, self.fitted(text, 11, 100), fontsize=11, color=self.theme.text,
            ha="center", va="center", transform=axes.transAxes, parse_math=False,
        )  # fmt: skip

    def _legend_rows(self) -> list[list[tuple[Entry, str, float]]]:
        """Entries in rows of as many columns as fit; each with its text and the pixels of its column."""
        if not self.entries or not self.options.legend:
            return []
        extra = HANDLE_POINTS + 18
        limit = max(1, int((self.options.height * 0.38) / (ROW_POINTS * self.point)))
        texts = [self.fitted(entry.label, LEGEND_POINTS, 24 + extra) for entry in self.entries]
        sizes = [self.width_of(text, LEGEND_POINTS) + extra * self.point for text in texts]
        room = self.options.width - 24 * self.point
        columns = next(n for n in range(len(sizes), 0, -1) if n == 1 or sum(column_widths(sizes, n)) <= room)
        columns = -(-len(sizes) // -(-len(sizes) // columns))  # as even as possible in as many rows
        widths = column_widths(sizes, columns)
        shown = list(zip(self.entries, texts, strict=True))
        if len(shown) > limit * columns:
            left_out = len(shown) - (limit * columns - 1)
            rest = Entry("", self.theme.background)
            shown = [*shown[: limit * columns - 1], (rest, f"and {left_out} more")]
        return [
            [(*entry, widths[column]) for column, entry in enumerate(shown[start : start + columns])]
            for start in range(0, len(shown), columns)
        ]

    def _draw_legend(self, rows: list[list[tuple[Entry, str, float]]]) -> None:
        if not rows:
            return
        width, height, point = self.options.width, self.options.height, self.point
        begin = (width - sum(size for _, _, size in rows[0])) / 2 + 6 * point
        for index, row in enumerate(rows):
            y = (6 + ROW_POINTS * (len(rows) - index - 0.5)) * point / height
            left = begin
            for entry, text, size in row:
                self._draw_entry(entry, left / width, y)
                place = left + (HANDLE_POINTS + 6) * point
                self.write(place, y * height, text, LEGEND_POINTS, vertical="center")
                left += size

    def _draw_entry(self, entry: Entry, x: float, y: float) -> None:
        """The line, marker or area before an entry's words."""
        length, half = HANDLE_POINTS * self.point / self.options.width, 4 * self.point / self.options.height
        if entry.patch:
            style: dict[str, Any] = {"facecolor": entry.color, "alpha": entry.patch, "linewidth": 0}
            self.figure.add_artist(Rectangle((x, y - half), length, 2 * half, **style))
        thin = entry.marker in ("|", "x")
        self.figure.add_artist(
            Line2D(
                [x, x + length / 2, x + length], [y, y, y],
                color=entry.color, linestyle=entry.linestyle, linewidth=1.6,
                marker=entry.marker or None, markevery=[1], markersize=7,
                markeredgecolor=entry.color if thin else self.theme.background,
                markeredgewidth=1.4 if thin else 0.6,
            )
        )  # fmt: skip

    def save(self, kind: Kind) -> bytes:
        """The finished picture; the same bytes for the same content."""
        if self.ruled is not None:
            rule(*self.ruled, (self.theme.text, self.theme.faint), self.words.append)
            self.ruled = None
        sink = io.BytesIO()
        written = [words for words in self.words if words.text]
        if kind is Kind.png:
            self.canvas.draw()
            pixels = np.ascontiguousarray(np.asarray(self.canvas.buffer_rgba())[..., :3])
            for words in written:
                blend(pixels, words, self.options.dpi)
            # Charts are runs of one colour: run lengths alone pack them as well as level 6 does, which
            # takes three times as long.
            dpi = (self.options.dpi, self.options.dpi)
            image = Image.fromarray(pixels)
            image.save(sink, format="png", compress_level=1, compress_type=RUN_LENGTHS, dpi=dpi)
            return sink.getvalue()
        for words in written:
            add_text(self.figure, words)
        dates = {"Date": None} if kind is Kind.svg else {"CreationDate": None}
        self.figure.savefig(sink, format=kind.value, metadata=dates)
        return sink.getvalue()


def column_widths(sizes: list[float], columns: int) -> list[float]:
    """The widest of every column, where entries fill rows from left to right."""
    return [max(sizes[column::columns]) for column in range(columns)]


def number_format(value: float, _: object = None) -> str:
    """Short tick labels: 0.25, 12, 3K, 1.5M, 2e+12."""
    size = abs(value)
    if size >= 1e12 or 0 < size < 1e-4:
        return f"{value:.3g}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'K' else limit):g}{suffix}"
    return f"{value:g}"


NUMBERS = FuncFormatter(number_format)


def label_logs(axis: Axis, low: float, high: float) -> None:
    """Plain numbers on a log axis; between the powers of ten too where these are few."""
    axis.set_major_formatter(NUMBERS)
    decades = math.log10(high / low)
    axis.set_minor_locator(LogLocator(subs=(2, 5) if decades < 1.7 else "all", numticks=30))
    axis.set_minor_formatter(NUMBERS if decades < 1.7 else NullFormatter())

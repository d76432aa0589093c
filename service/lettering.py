"""Words on a picture: set once, kept as masks, and laid over the finished pixels.

matplotlib sets every glyph anew for every figure; with a legend and the ticks of two axes that took
longer than all the rest of a picture. On a PNG the words are blended in from a cache of masks; an
SVG or PDF gets them as text.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import LoadFlags

Vertical = Literal["baseline", "center", "top"]
CAP_HEIGHT = 0.73  # of the size, in DejaVu Sans, matplotlib's own font
MAX_MASKS = 1500
# A character that the font lacks is a box on the picture; whoever typed it sees that, the log needn't.
warnings.filterwarnings("ignore", message=r"Glyph \d+ ")


@dataclass(frozen=True)
class Words:
    """A line of text at a place of the page: pixels from the left and from the bottom."""

    x: float
    y: float
    text: str
    points: float
    color: str
    horizontal: Literal["left", "center", "right"] = "left"
    vertical: Vertical = "baseline"
    upright: bool = False  # read from below, as beside a y axis: then x is that of its middle line


@functools.lru_cache(maxsize=20_000)
def advance(character: str) -> float:
    """Width of a character in the text font, as a share of its size; of a box, if the font lacks it."""
    font = get_font(findfont(FontProperties()))
    font.set_size(100, 72)
    return float(font.load_glyph(font.get_char_index(ord(character))).linearHoriAdvance / 65536 / 100)


def width_of(text: str, points: float) -> float:
    """Points that a line of text takes, kerning left out."""
    return sum(map(advance, text)) * points


@functools.lru_cache(maxsize=MAX_MASKS)
def mask_of(text: str, points: float, dpi: float) -> tuple[np.ndarray, float]:
    """Coverage (height, width) of a text, 0 to 255, and how far it reaches below its baseline."""
    font = get_font(findfont(FontProperties()))
    font.set_size(points, dpi)
    font.set_text(text, 0.0, flags=LoadFlags.FORCE_AUTOHINT)
    font.draw_glyphs_to_bitmap(antialiased=True)
    return np.array(font.get_image(), np.uint8), font.get_descent() / 64


def blend(pixels: np.ndarray, words: Words, dpi: float) -> None:
    """Lay words over pixels (height, width, 3) of uint8, rows from the top; what is off the page is cut."""
    mask, descent = mask_of(words.text, words.points, dpi)
    size = words.points * dpi / 72
    lift = {"baseline": 0.0, "center": CAP_HEIGHT / 2, "top": CAP_HEIGHT}[words.vertical] * size
    shift = {"left": 0.0, "center": 0.5, "right": 1.0}[words.horizontal] * mask.shape[1]
    if words.upright:
        mask = np.rot90(mask)
        right = words.x + lift + descent
        left, bottom = right - mask.shape[1], words.y - shift
    else:
        left, bottom = words.x - shift, words.y - lift - descent
    height, width = mask.shape
    column, row = round(left), pixels.shape[0] - round(bottom) - height
    cut = mask[max(0, -row) : pixels.shape[0] - row, max(0, -column) : pixels.shape[1] - column, None]
    place = pixels[max(0, row) : row + height, max(0, column) : column + width]
    if cut.size and place.size:
        cut = cut.astype(np.uint16)
        color = (np.array(to_rgb(words.color)) * 255).round().astype(np.uint16)
        place[:] = (place * (255 - cut) + color * cut + 127) // 255


def add_text(figure: Figure, words: Words) -> None:
    """The same words as text of a figure; never read as mathematics."""
    size = words.points * figure.dpi / 72
    lift = {"baseline": 0.0, "center": CAP_HEIGHT / 2, "top": CAP_HEIGHT}[words.vertical] * size
    x, y = (words.x + lift, words.y) if words.upright else (words.x, words.y - lift)
    width, height = figure.get_size_inches() * figure.dpi
    turned: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor"} if words.upright else {}
    figure.text(
        x / width, y / height, words.text, fontsize=words.points, color=words.color, parse_math=False,
        ha=words.horizontal, va="baseline", **turned,
    )  # fmt: skip

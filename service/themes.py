"""Colours and markers: themes, and the cycle of lines.

Raw lines are solid, since a gap of a dash could hide a spike one step wide; in grey print they are
told apart by their markers and by how dark they are.
"""

from dataclasses import dataclass

MARKERS = ("o", "^", "v", "D", "s", "P", "X", "<", ">", "p", "h")


@dataclass(frozen=True)
class Theme:
    """Colours of a picture. `cycle` is Okabe and Ito's, which the colour-blind can tell apart."""

    background: str
    text: str
    faint: str
    cycle: tuple[str, ...]
    colormap: str
    line_width: float = 1.0


_LIGHT = ("#0060a8", "#ee9a1a", "#008a64", "#d46aac", "#b8430a", "#4aa8e0", "#5a5a5a", "#a89600")
_DARK = ("#4d9be6", "#ffb545", "#2fb78e", "#ea98cb", "#f0764a", "#8fd0ff", "#bdbdbd", "#e0d040")
_PRINT = ("#003a70", "#e39a1c", "#006e50", "#c873a4", "#8c2f00", "#56b4e9", "#000000", "#8f8000")
THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d8dde3", _LIGHT, "viridis"),
    "dark": Theme("#14181d", "#e6e9ec", "#343b43", _DARK, "viridis"),
    "print": Theme("#ffffff", "#000000", "#d0d0d0", _PRINT, "cividis", 0.8),
}


def look(theme: Theme, index: int) -> tuple[str, str]:
    """Colour and marker of the line `index`; 88 pairs before one repeats."""
    return theme.cycle[index % len(theme.cycle)], MARKERS[index % len(MARKERS)]

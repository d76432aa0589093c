"""Plots: what can be asked for by name, each a function from a Scene to a Sheet. -> PLOTS

A new plot is one function and one line in PLOTS; its route, its listing and its tests follow.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.curves import Arm
from service.lines import draw_lines
from service.options import Kind, PictureOptions
from service.style import Sheet


@dataclass(frozen=True)
class Scene:
    """What a picture shows: arms with their traces, and the name of what they belong to."""

    name: str
    arms: list[Arm]
    warnings: list[str] = field(default_factory=list)


Draw = Callable[[Scene, PictureOptions, "Plot"], Sheet]


@dataclass(frozen=True)
class Plot:
    """A plot: what it is called, what it reads, how it is drawn."""

    title: str
    ylabel: str
    columns: tuple[str, ...]  # of the trace; `prefix/*` for a group
    draw: Draw
    yscale: str = "linear"
    from_zero: bool = False
    absent: str = "nothing was recorded yet"  # what the picture says where there is no data


def lines(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """Lines of one column against the step."""
    return draw_lines(scene, options, plot, lambda recorded: recorded[plot.columns[0]])


def render(name: str, scene: Scene, options: PictureOptions, kind: Kind) -> bytes:
    """A picture as the bytes of its file."""
    plot = PLOTS[name]
    return plot.draw(scene, options, plot).save(kind)


PLOTS: dict[str, Plot] = {
    "gradnorm": Plot(
        "Gradient norm", "Gradient norm (before clipping)", ("grad_norm", "grad_norm_clipped"), lines,
        from_zero=True, absent="no gradient norm was recorded yet",
    ),
    "loss": Plot("Training loss", "Loss", ("loss",), lines, absent="no loss was recorded yet"),
}  # fmt: skip

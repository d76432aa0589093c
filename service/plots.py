"""Plots: what can be asked for by name, each a function from a Scene to a Sheet. -> PLOTS

A new plot is one function and one line in PLOTS; its route, its listing and its tests follow.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.curves import Arm
from service.derived import draw_clipped_fraction, draw_update_ratio
from service.distributions import draw_histogram, draw_spikes
from service.heatmaps import draw_layers
from service.lines import draw_lines
from service.options import Kind, PictureOptions
from service.scatters import draw_importance, draw_lr_sensitivity, draw_pareto
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
    lines: bool = True  # one line an arm, of which a picture holds so many
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
    "val_loss": Plot(
        "Validation loss", "Loss", ("val_loss",), lines,
        absent="no validation loss was recorded",
    ),
    "lr": Plot(
        "Learning rate", "Learning rate", ("lr",), lines, from_zero=True,
        absent="no learning rate was recorded yet",
    ),
    "clipped_fraction": Plot(
        "Clipped steps", "Share of steps clipped", ("grad_norm", "grad_norm_clipped", "clip_threshold"),
        draw_clipped_fraction, from_zero=True, absent="no clipping was recorded yet",
    ),
    "layer_gradnorm": Plot(
        "Gradient norm by layer", "Layer", ("grad_norm/*",), draw_layers,
        absent="no norms by layer were recorded",
    ),
    "attn_logit": Plot(
        "Largest attention logit", "Largest attention logit", ("attn_logit_max",), lines,
        absent="no attention logits were recorded",
    ),
    "update_ratio": Plot(
        "Update ratio", "Update / weight norm", ("update_ratio/*",), draw_update_ratio, yscale="log",
        absent="no update ratios were recorded",
    ),
    "spikes": Plot("Spikes", "Trial", ("grad_norm", "loss"), draw_spikes, absent="nothing was recorded yet"),
    "norm_hist": Plot(
        "Gradient norms", "Share of steps", ("grad_norm", "clip_threshold"), draw_histogram, from_zero=True,
        absent="no gradient norm was recorded yet",
    ),
    "lr_sensitivity": Plot(
        "Learning-rate sensitivity", "Final loss", (), draw_lr_sensitivity, lines=False,
        absent="no trial with a learning rate has ended yet",
    ),
    "pareto": Plot(
        "Loss and stability", "Highest gradient norm", (), draw_pareto, yscale="log", lines=False,
        absent="no trial has ended with a loss and a norm yet",
    ),
    "importance": Plot(
        "What matters", "", (), draw_importance, lines=False,
        absent="too few ended trials differ in a repeated setting to compare",
    ),
}  # fmt: skip

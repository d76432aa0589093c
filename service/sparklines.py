"""A sparkline: the gradient norm of a run at a glance, one thin line an arm, as a small SVG.

Log scale, since a spike would press everything else flat; sampled by the rule of service.sampling,
so that the spike is there.
"""

import numpy as np

from service.fields import Row
from service.sampling import Series
from service.store import Selection, Store

WIDTH, HEIGHT, MARGIN = 140, 30, 3
NUM_POINTS, NUM_LINES = 120, 6
# Seen on light and on dark ground: an image doesn't know the page's theme.
COLORS = ("#2f86d6", "#d9820f", "#17a079", "#c766a3", "#cf5a20", "#7f8790")
METRIC = "grad_norm"


def sparkline(store: Store, selection: Selection) -> str:
    """The SVG of a run (the first seed of each arm), or of a trial."""
    rows: dict[int, Row] = {}
    for row in selection.trials:
        rows.setdefault(row["arm_number"], row)
    chosen = list(rows.values())[:NUM_LINES]
    every = [store.read(selection.run, row, [METRIC])[METRIC].sampled(NUM_POINTS) for row in chosen]
    shapes = [
        shape for line, color in zip(lines(every), COLORS, strict=False) for shape in drawn(*line, color)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(shapes)}</svg>'
    )


def lines(every: list[Series]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pixels of each series, on axes that all share; y is NaN where there is no positive finite value."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = [np.where(one.values > 0, np.log(one.values.astype(np.float64)), np.nan) for one in every]
    logs = [np.where(np.isfinite(one), one, np.nan) for one in logs]
    values = np.concatenate([*logs, np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return [(np.zeros(0), np.zeros(0)) for _ in every]
    low, high = float(values.min()), float(values.max())
    room = max(high - low, 0.1)
    end = max(float(one.steps[-1]) for one in every if len(one))
    return [
        (
            MARGIN + (WIDTH - 2 * MARGIN) * one.steps / max(end, 1.0),
            HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (log - low) / room,
        )
        for one, log in zip(every, logs, strict=True)
    ]


def drawn(x: np.ndarray, y: np.ndarray, color: str) -> list[str]:
    """A path with its gaps, and a cross at its last value where some are missing."""
    finite = np.isfinite(y)
    if not finite.any():
        return []
    words, pen = [], "M"
    for place in range(len(x)):
        if finite[place]:
            words.append(f"{pen}{x[place]:.1f} {y[place]:.1f}")
            pen = "L"
        else:
            pen = "M"
    path = f'<path d="{"".join(words)}h.1" fill="none" stroke="{color}" stroke-linecap="round"/>'
    if finite.all():
        return [path]
    last = int(np.flatnonzero(finite)[-1])
    cross = f"M{x[last] - 2.5:.1f} {y[last] - 2.5:.1f}l5 5m0-5l-5 5"
    return [path, f'<path d="{cross}" stroke="#d1242f" stroke-width="1.8"/>']

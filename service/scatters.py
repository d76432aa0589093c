"""Pictures of one number a trial: learning-rate sweeps, loss against stability, what matters most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from service.analysis import explained, lr_sensitivity
from service.lines import set_yscale
from service.options import PictureOptions
from service.style import NUMBERS, Entry, Sheet, label_logs
from study.selectors import flatten

if TYPE_CHECKING:
    from service.plots import Plot, Scene

Row = dict[str, Any]
ENDED = ("finished", "diverged", "pruned", "failed")


def number(row: Row, *names: str) -> float | None:
    """The first of these numbers that a trial's summary or row has, if it is finite."""
    summary = row["summary"] or {}
    for name in names:
        value = summary.get(name, row.get(name))
        if isinstance(value, int | float) and np.isfinite(value):
            return float(value)
    return None


def draw_lr_sensitivity(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """Final loss against learning rate; lines join trials that differ in nothing else but the seed."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    rows = [trial.row for arm in scene.arms for trial in arm.trials]
    groups = sweeps(rows)
    lines = []
    for index, (label, members) in enumerate(groups):
        points = [(rate_of(row), row) for row in members if row["status"] in ENDED]
        rates = [rate for rate, _ in points if rate is not None]
        swept = [row for rate, row in points if rate is not None]
        gone = [row["status"] == "diverged" for row in swept]
        ends = [number(row, "final_loss", "loss") for row in swept]
        counted = [np.nan if lost or end is None else end for lost, end in zip(gone, ends, strict=True)]
        start = max((number(row, "initial_loss") or -np.inf for row in swept), default=-np.inf)
        value = lr_sensitivity(rates, counted, start) if np.isfinite(start) else None
        note = f" (sensitivity {value:.3g})" if value is not None else ""
        sheet.entries.append(Entry(label + note, *sheet.look(index)))
        lines.append((index, np.array(rates), np.array(counted)))
    finite = np.concatenate([loss[np.isfinite(loss)] for _, _, loss in lines] or [np.zeros(0)])
    num_diverged = sum(int(np.isnan(loss).sum()) for _, _, loss in lines)
    if num_diverged:
        sheet.entries.append(Entry(f"diverged ({num_diverged})", sheet.theme.text, "X", ""))
    axes = sheet.axes("Learning rate", plot.ylabel)
    if not any(len(lrs) for _, lrs, _ in lines):
        sheet.say(axes, plot.absent)
        return sheet
    set_yscale(axes, finite, options, plot)
    axes.set_xscale("log")
    for index, lrs, losses in lines:
        color, marker = sheet.look(index)
        good = np.isfinite(losses)
        known = np.unique(lrs[good])
        means = [losses[good & (lrs == rate)].mean() for rate in known]
        style: dict[str, Any] = {"color": color, "marker": marker, "markeredgecolor": sheet.theme.background}
        axes.plot(lrs[good], losses[good], ls="none", markersize=5, alpha=0.6, **style)
        axes.plot(known, means, linewidth=1.5, markersize=8, **style)
        broken = np.unique(lrs[~good]) * 1.04 ** (index - (len(lines) - 1) / 2)  # side by side
        axes.plot(
            broken, np.full(len(broken), 0.96), ls="none", marker="X", markersize=9, color=color,
            markeredgecolor=sheet.theme.text, transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    every = np.concatenate([lrs for _, lrs, _ in lines])
    label_logs(axes.xaxis, every.min() / 1.5, every.max() * 1.5)
    axes.set_xlim(every.min() / 1.5, every.max() * 1.5)
    axes.yaxis.set_major_formatter(NUMBERS)
    return sheet


def rate_of(row: Row) -> float | None:
    """The trial's peak learning rate, if it is one that a log axis can show."""
    rate = flatten(row["config"]).get("optimizer.lr")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def sweeps(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Trials together that differ in learning rate and seed alone; named by what tells them apart."""
    flat = [
        {
            name: str(value)
            for name, value in flatten(row["config"]).items()
            if name not in ("optimizer.lr", "seed")
        }
        for row in rows
    ]
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for fields, row in zip(flat, rows, strict=True):
        groups.setdefault(tuple(sorted(fields.items())), []).append(row)
    telling = [name for name in varied(rows) if name not in ("optimizer.lr", "seed")]
    named = []
    for key, members in groups.items():
        fields = dict(key)
        words = [f"{name.rpartition('.')[2]}={fields.get(name, '-')}" for name in telling]
        named.append((", ".join(words) or "all trials", members))
    return named


def varied(rows: Sequence[Row]) -> list[str]:
    """Config fields that have more than one value among the trials."""
    values: dict[str, set[str]] = {}
    flat = [flatten(row["config"]) for row in rows]
    for name in dict.fromkeys(name for fields in flat for name in fields):
        values[name] = {str(fields.get(name)) for fields in flat}
    return [name for name, known in values.items() if len(known) > 1]


def draw_pareto(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """Highest norm against final loss: small, every trial; large, the mean of an arm; line, the front."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    arms = []
    for index, arm in enumerate(scene.arms):
        rows = [trial.row for trial in arm.trials]
        pairs = [(number(row, "counted_loss", "final_loss"), number(row, "peak_grad_norm")) for row in rows]
        known = np.array([pair for pair in pairs if None not in pair], np.float64).reshape(-1, 2)
        num_diverged = sum(row["status"] == "diverged" for row in rows)
        note = f", {num_diverged} diverged" if num_diverged else ""
        sheet.entries.append(Entry(f"{arm.label} (n={len(known)}{note})", *sheet.look(index), ""))
        if len(known):
            arms.append((index, known, known.mean(axis=0)))
    means = np.array([mean for _, _, mean in arms]).reshape(-1, 2)
    front = [
        k for k in range(len(means)) if not (np.all(means <= means[k], 1) & np.any(means < means[k], 1)).any()
    ]
    if len(front) > 1:
        sheet.entries.append(Entry("arms that no other beats in both", sheet.theme.text, linestyle="--"))
    axes = sheet.axes("Final loss (diverged: at most the initial loss)", plot.ylabel)
    if not arms:
        sheet.say(axes, plot.absent)
        return sheet
    every = np.concatenate([known for _, known, _ in arms])
    set_yscale(axes, every[:, 1], options, plot)
    room = np.ptp(every[:, 0]) * 0.06 or 0.1
    axes.set_xlim(every[:, 0].min() - room, every[:, 0].max() + room)
    order = sorted(front, key=lambda k: means[k][0])
    axes.plot(means[order, 0], means[order, 1], color=sheet.theme.text, linestyle="--", linewidth=1.0)
    for index, known, mean in arms:
        color, marker = sheet.look(index)
        style: dict[str, Any] = {
            "color": color,
            "marker": marker,
            "ls": "none",
            "markeredgecolor": sheet.theme.background,
        }
        axes.plot(known[:, 0], known[:, 1], markersize=5, alpha=0.55, **style)
        axes.plot([mean[0]], [mean[1]], markersize=11, zorder=4, **style)
    axes.xaxis.set_major_formatter(NUMBERS)
    axes.yaxis.set_major_formatter(NUMBERS)
    return sheet


def draw_importance(scene: Scene, options: PictureOptions, plot: Plot) -> Sheet:
    """Eta squared of every varied field: its share of the variance between trials, one field at a time."""
    sheet = Sheet(options, f"{plot.title} · {scene.name}")
    rows = [trial.row for arm in scene.arms for trial in arm.trials if trial.row["status"] in ENDED]
    targets = {
        "final loss": ("counted_loss", "final_loss", "loss"),
        "log of the highest norm": ("peak_grad_norm",),
    }
    bars: list[tuple[str, list[float | None]]] = []
    for name in varied(rows):
        shares: list[float | None] = []
        for what, sources in targets.items():
            pairs = [(number(row, *sources), flatten(row["config"]).get(name)) for row in rows]
            known = [
                (value, word)
                for value, word in pairs
                if value is not None and (value > 0 or "log" not in what)
            ]
            values = [np.log(value) if "log" in what else value for value, _ in known]
            shares.append(explained(values, [word for _, word in known]))
        if any(share is not None for share in shares):
            bars.append((name, shares))
    bars.sort(key=lambda bar: max(share or 0.0 for share in bar[1]))
    bars = bars[-20:]
    for index, what in enumerate(targets):
        sheet.entries.append(Entry(f"{what} (n={len(rows)} trials)", sheet.look(index)[0], patch=0.9))
    axes = sheet.axes("Share of the variance explained (eta squared)", "")
    if not bars:
        sheet.say(axes, plot.absent)
        return sheet
    for place, (_, shares) in enumerate(bars):
        for index, share in enumerate(shares):
            if share is not None:
                color = sheet.look(index)[0]
                y = place + 0.2 - 0.4 * index
                axes.barh(y, share, height=0.36, color=color, alpha=0.9)
                side: Any = {"ha": "right"} if share > 0.9 else {"ha": "left"}
                axes.text(share, y, f" {share:.2f} ", fontsize=8, va="center", color=sheet.theme.text, **side)
    axes.set_xlim(0, 1)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(NUMBERS)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_yticks(range(len(bars)), [name.rpartition(".")[2][:16] for name, _ in bars], parse_math=False)
    return sheet

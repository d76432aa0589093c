"""Stability numbers: what a trial's trace says in a few figures. Pure numpy, no files, no torch.

    summary = summarize(trace.columns(), status="diverged", reason="nonfinite_loss")
    summary["peak_grad_norm"], summary["peak_step"]
    summary["spike_score_grad_norm"]     # None: and
    summary["undefined"]                 # {"spike_score_grad_norm": "needs 1,000 finite values, has 240"}

A number that has no value is None, with its reason under `undefined`; never 0, NaN or inf. Every
name stands in METRICS (glossary.py) with its definition, unit, direction and source. "The norm" is
`grad_norm`, before clipping, one value per optimizer step.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from study.glossary import METRICS, STAGES, metric_of
from study.spikes import OLMO_CORE, SPIKE_SCORE, find_spikes

__all__ = [
    "METRICS",
    "Summary",
    "gradient_noise_scale",
    "lr_sensitivity",
    "metric_of",
    "model_update",
    "summarize",
    "update_to_weight",
]

Columns = Mapping[str, np.ndarray]

START_STEPS = 10
SETTLED_WITHIN = 0.25  # of the end level
MIN_WINDOW = 5  # steps whose median is compared with it
MAX_LISTED_STEPS = 100
CORE_COLUMNS = frozenset(
    ("step", "loss", "grad_norm", "grad_norm_clipped", "lr", "clip_threshold", "skipped", "loss_scale")
    + ("val_loss",)
)


class Summary(dict[str, Any]):
    """Flat and ready for JSON: name -> finite number, list or None, and `undefined`: name -> reason."""

    def __init__(self) -> None:
        super().__init__(undefined={})

    def put(self, name: str, value: Any, reason: str = "no finite value") -> None:
        """Keep `value` under `name`; what is None or not finite becomes None because of `reason`."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or (isinstance(value, float) and not np.isfinite(value)):
            self[name] = None
            self["undefined"][name] = reason
        else:
            self[name] = value


def summarize(
    columns: Columns, *, status: str = "finished", reason: str | None = None, num_steps: int | None = None
) -> Summary:
    """The METRICS of one trace.

    `columns`: arrays of one length, NaN where not sampled: `step` (from 1, contiguous), `loss`,
    `grad_norm`, and where there are `grad_norm_clipped`, `clip_threshold`, `skipped`,
    `loss_scale`, `val_loss`, and any sampled column such as `attn_logit_max`. `status` and
    `reason` are the catalogue's; `num_steps` is how long the trial was meant to be (None: as long
    as it is). ValueError if a needed column is missing or the lengths differ.
    """
    missing = [name for name in ("step", "loss", "grad_norm") if name not in columns]
    lengths = {len(column) for column in columns.values()}
    if missing or len(lengths) > 1:
        problem = f"lacks {', '.join(missing)}" if missing else f"has columns of lengths {sorted(lengths)}"
        raise ValueError(f"trace {problem}; columns: {', '.join(sorted(columns))}")
    summary = Summary()
    recorded = len(columns["step"])
    summary.put("num_steps", recorded)
    _describe_level(summary, columns, max(recorded, num_steps or 0))
    _describe_loss(summary, columns)
    _describe_spikes(summary, columns)
    _describe_clipping(summary, columns)
    _describe_end(summary, columns, status, reason)
    for name in columns:
        if name not in CORE_COLUMNS:
            _describe_sampled(summary, name, columns[name])
    _compare_depths(summary)
    return summary


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)].astype(np.float64)


def _median(values: np.ndarray) -> float | None:
    finite = _finite(values)  # in float64: the middle of two large float32 values can overflow
    return float(np.median(finite)) if len(finite) else None


def _describe_level(summary: Summary, columns: Columns, planned: int) -> None:
    step, norm = columns["step"], columns["grad_norm"]
    finite = np.isfinite(norm)
    none = "no finite gradient norm"
    recorded = len(norm)
    summary.put("first_grad_norm", norm[0] if recorded else None, "the first norm is not finite")
    summary.put("start_grad_norm", _median(norm[:START_STEPS]), f"{none} in the first {START_STEPS} steps")
    peak = int(np.argmax(np.where(finite, norm, -np.inf))) if finite.any() else None
    summary.put("peak_grad_norm", None if peak is None else norm[peak], none)
    summary.put("peak_step", None if peak is None else step[peak], none)
    means = _means(norm[: recorded - recorded % 100].reshape(-1, 100))
    highest = None if not np.isfinite(means).any() else np.nanmax(means)
    summary.put("peak_grad_norm_mean_100", highest, f"needs 100 steps with a finite norm, has {finite.sum()}")
    summary.put("median_grad_norm", _median(norm), none)
    middle = summary["median_grad_norm"]
    ratio = summary["peak_grad_norm"] / middle if middle else None
    summary.put("peak_over_median_grad_norm", ratio, none if middle is None else "the median norm is 0")
    around = norm[max(0, round(0.38 * planned) - 1) : round(0.42 * planned)]
    at_40 = _median(around) if recorded >= round(0.42 * planned) else None
    summary.put("grad_norm_at_40_percent", at_40, f"ended at step {recorded} of {planned} or {none} there")
    level = _median(norm[recorded - max(1, recorded // 10) :]) if recorded else None
    summary.put("end_grad_norm", level, f"{none} in the last tenth")
    why = "outside the band around the end level at the end" if level else f"{none} in the last tenth, or 0"
    summary.put("settling_step", _settling_step(step, norm, level), why)


def _settling_step(step: np.ndarray, norm: np.ndarray, level: float | None) -> int | None:
    if not level:
        return None
    windows = _windows(norm, max(MIN_WINDOW, len(norm) // 100))
    if np.isfinite(windows).all():
        medians = np.median(windows.astype(np.float64), axis=1)
    else:
        medians = np.array([np.nan if (m := _median(window)) is None else m for window in windows])
    outside = np.flatnonzero(~(np.abs(medians - level) <= SETTLED_WITHIN * level))
    if not len(outside):
        return int(step[0])
    settled = len(norm) - (len(windows) - int(outside[-1]) - 1) * windows.shape[1]
    return int(step[settled]) if settled < len(norm) else None


def _windows(values: np.ndarray, width: int) -> np.ndarray:
    # Consecutive windows, counted back from the end; what is left over at the beginning is left out.
    return values[len(values) % width :].reshape(-1, width)


def _means(windows: np.ndarray) -> np.ndarray:
    # The mean of each window's finite values; NaN where it has none.
    finite = np.isfinite(windows)
    count = finite.sum(axis=1)
    total = windows.sum(axis=1, where=finite, dtype=np.float64)
    return np.divide(total, count, out=np.full(len(windows), np.nan), where=count > 0)


def _describe_loss(summary: Summary, columns: Columns) -> None:
    loss = columns["loss"]
    recorded = len(loss)
    summary.put("initial_loss", loss[0] if recorded else None, "the first loss is not finite")
    means = _means(_windows(loss, max(1, recorded // 100)))
    final = means[-1] if recorded and np.isfinite(loss[-1]) else None
    summary.put("final_loss", final, "the last loss is not finite")
    best = np.nanmin(means) if np.isfinite(means).any() else None
    summary.put("best_loss", best, "no finite loss")
    sampled = _finite(columns["val_loss"]) if "val_loss" in columns else np.empty(0)
    summary.put("best_val_loss", sampled.min() if len(sampled) else None, "validation loss not sampled")
    summary.put("final_val_loss", sampled[-1] if len(sampled) else None, "validation loss not sampled")


def _describe_spikes(summary: Summary, columns: Columns) -> None:
    step = columns["step"]
    any_spike = np.zeros(len(step), bool)
    for name in ("grad_norm", "loss"):
        spikes, num_judged = find_spikes(columns[name])
        num_finite = int(np.isfinite(columns[name]).sum())
        why = f"needs {SPIKE_SCORE.needs:,} finite values, has {num_finite:,}"
        defined = num_judged > 0
        summary.put(f"spike_score_{name}", 100.0 * len(spikes) / num_judged if defined else None, why)
        summary.put(f"num_spikes_{name}", len(spikes) if defined else None, why)
        steps = step[spikes[:MAX_LISTED_STEPS]].tolist() if defined else None
        summary.put(f"spike_steps_{name}", steps, why)
        any_spike[find_spikes(columns[name], OLMO_CORE)[0]] = True
    why = f"needs {OLMO_CORE.window:,} steps, has {len(step):,}"
    total = any_spike.mean() if len(step) >= OLMO_CORE.window else None
    summary.put("olmo_core_spike_fraction", total, why)
    recent = any_spike[-10_000:].mean() if len(step) >= 10_000 else None
    summary.put("olmo_core_spike_fraction_last_10000", recent, f"needs 10,000 steps, has {len(step):,}")


def _describe_clipping(summary: Summary, columns: Columns) -> None:
    norm = columns["grad_norm"].astype(np.float64)
    threshold = columns.get("clip_threshold", np.full(len(norm), np.nan))
    after = columns.get("grad_norm_clipped", np.full(len(norm), np.nan))
    skipped = columns.get("skipped", np.zeros(len(norm), bool)).astype(bool)
    by_threshold, by_norm = ~np.isnan(threshold), np.isfinite(after)
    # Rules without one threshold (by unit, by value) show only in the norm after them.
    clipped = np.where(by_threshold, norm > threshold, after < norm * (1 - 1e-6))
    known = np.isfinite(norm) & ~skipped & (by_threshold | by_norm)
    fraction = clipped[known].mean() if known.any() else None
    summary.put("clipped_fraction", fraction, "no step with a finite norm and a clipping record")
    summary.put("skipped_steps", skipped.sum() if "skipped" in columns else None, "not recorded")
    scale = _finite(columns["loss_scale"]) if "loss_scale" in columns else np.empty(0)
    drops = (np.diff(scale) < 0).sum() if len(scale) else None
    summary.put("loss_scale_drops", drops, "no loss scale in this precision")


def _describe_end(summary: Summary, columns: Columns, status: str, reason: str | None) -> None:
    step = columns["step"]
    bad_loss, bad_norm = ~np.isfinite(columns["loss"]), ~np.isfinite(columns["grad_norm"])
    summary.put("num_nonfinite_loss", bad_loss.sum())
    summary.put("num_nonfinite_grad_norm", bad_norm.sum())
    bad = np.flatnonzero(bad_loss | bad_norm)
    summary.put("first_nonfinite_step", step[bad[0]] if len(bad) else None, "every value is finite")
    diverged = status == "diverged" and len(step) > 0
    where = len(step) - 1
    if diverged and reason == "nonfinite_loss" and bad_loss.any():
        where = int(np.argmax(bad_loss))
    elif diverged and reason == "nonfinite_grad" and bad_norm[-1]:
        good = np.flatnonzero(~bad_norm)  # overflows that training got over are no divergence
        where = int(good[-1]) + 1 if len(good) else 0
    summary.put("diverged_step", step[where] if diverged else None, f"did not diverge ({status})")
    summary.put("diverged_reason", reason if diverged else None, f"did not diverge ({status})")
    start, end = summary["initial_loss"], summary["final_loss"]
    counted = start if diverged or end is None or start is None else min(end, start)
    summary.put("counted_loss", counted, "the first loss is not finite")


def _describe_sampled(summary: Summary, name: str, values: np.ndarray) -> None:
    finite = _finite(values)
    readings = (finite[0], finite.max(), finite[-1]) if len(finite) else (None, None, None)
    for stage, reading in zip(STAGES, readings, strict=True):
        summary.put(f"{stage}_{name}", reading, "not sampled" if not len(values) else "no finite sample")


def _compare_depths(summary: Summary) -> None:
    # grad_norm/block0.ffn ... grad_norm/block11.ffn -> grad_norm/block_last.ffn and so on, so that
    # models of unlike depth have a name in common.
    depths: dict[tuple[str, str], dict[int, str]] = {}
    for name in summary:
        if match := re.fullmatch(r"((?:first|peak|last)_[^/]+/\D*)(\d+)(.*)", name):
            depths.setdefault((match[1], match[3]), {})[int(match[2])] = name
    for (prefix, suffix), names in depths.items():
        first, last = summary[names[min(names)]], summary[names[max(names)]]
        summary.put(f"{prefix}_first{suffix}", first)
        summary.put(f"{prefix}_last{suffix}", last)
        ratio = last / first if first and last is not None else None
        summary.put(f"{prefix}_last_over_first{suffix}", ratio, "needs both ends, the first not 0")


def lr_sensitivity(lrs: np.ndarray, final_losses: np.ndarray, initial_loss: float) -> float | None:
    """Mean over a learning-rate sweep of min(loss, initial loss) - best loss (nats).

    `lrs` and `final_losses` are [k], one run each; a diverged run has NaN or inf and counts as
    `initial_loss`. Several runs at one rate count as their mean. Between 0 and initial - best.
    None for fewer than two rates. Wortsman et al. 2023 (arXiv 2309.14322), section 2.2.
    """
    rates = np.unique(np.asarray(lrs, np.float64))
    if len(rates) < 2 or not np.isfinite(initial_loss):
        return None
    losses = np.asarray(final_losses, np.float64)
    counted = np.minimum(np.where(np.isfinite(losses), losses, initial_loss), initial_loss)
    by_rate = np.array([counted[np.asarray(lrs) == rate].mean() for rate in rates])
    return float((by_rate - by_rate.min()).mean())


def model_update(before: np.ndarray, after: np.ndarray) -> float:
    """Root mean square over positions of ||after - before||, for logits [..., vocabulary].

    How far training moved the function on one fixed probe batch, whatever that batch's size.
    DeepNet (arXiv 2203.00555), section 3.
    """
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    return float(np.sqrt((difference**2).sum(axis=-1).mean()))


def update_to_weight(update_norm: np.ndarray, weight_norm: np.ndarray) -> np.ndarray:
    """||update|| / ||weight||, elementwise; NaN where the weight is 0."""
    update, weight = np.asarray(update_norm, np.float64), np.asarray(weight_norm, np.float64)
    return np.divide(
        update, weight, out=np.full(np.broadcast(update, weight).shape, np.nan), where=weight > 0
    )


def gradient_noise_scale(
    small_norms: np.ndarray, big_norms: np.ndarray, small_batch: int, big_batch: int
) -> float | None:
    """B_simple = tr(S) / |G|^2 in samples, from gradient norms at two batch sizes (b < B).

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), each
    averaged over the steps [n] before they are divided. None where the estimate of |G|^2 is not
    positive: too few steps for their noise. McCandlish et al. 2018 (arXiv 1812.06162), appendix A.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(f"batches {small_batch} and {big_batch}; the first must be positive and smaller")
    small = float((np.asarray(small_norms, np.float64) ** 2).mean())
    big = float((np.asarray(big_norms, np.float64) ** 2).mean())
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return noise / signal if signal > 0 and np.isfinite(noise) else None

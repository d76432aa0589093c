"""What the stability numbers mean and how they are written: every name of a summary, in one table.

Used by metrics.py (which computes them), by claims (which may name only these) and by the reading
and the docs. Sampled columns of a trace add a first_, peak_ and last_ number each.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Any

STAGES = ("first", "peak", "last")
BY_FACTORS = ("norm", "logit", "rms")  # units of what varies by factors: compared by ratios


@dataclass(frozen=True)
class Metric:
    """What a number means: in one line, its unit, which way is calmer (None: neither), its source."""

    definition: str
    unit: str
    better: str | None = "lower"
    source: str = ""


def metric_of(name: str) -> Metric:
    """The Metric of a name in a summary; sampled columns have one each for first, peak and last.

    ValueError for a name that no summary can have.
    """
    if name in METRICS:
        return METRICS[name]
    stage, _, column = name.partition("_")
    head, slash, _ = column.partition("/")
    if stage in STAGES and head + slash in SAMPLED:
        unit, better = SAMPLED[head + slash]
        ratio = "_last_over_first" in column  # of the deepest layer to the first
        return Metric(f"{stage} finite sample of {column}", "1" if ratio else unit, None if ratio else better)
    nearest = difflib.get_close_matches(name, METRICS, n=1)
    hint = f", did you mean '{nearest[0]}'?" if nearest else ""
    known = [*METRICS, *(f"{{first,peak,last}}_{column}" for column in SAMPLED)]
    raise ValueError(f"unknown metric '{name}'{hint}; known: {', '.join(known)}")


def say(value: float | None) -> str:
    """A number as the reading and the verdicts write it: whole, or to three significant digits."""
    if value is None:
        return "-"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def sentence(template: str, **parts: float | str | None) -> dict[str, Any]:
    """{text, numbers}: the template filled in, its numbers by `say`, and those numbers as they are."""
    written = {name: part if isinstance(part, str) else say(part) for name, part in parts.items()}
    numbers = {name: part for name, part in parts.items() if not isinstance(part, str)}
    return {"text": template.format(**written), "numbers": numbers}


# Sampled columns, and groups of them (with a slash) -> unit, which way is calmer.
SAMPLED: dict[str, tuple[str, str | None]] = {
    "attn_logit_max": ("logit", "lower"),
    "grad_norm/": ("norm", "lower"),
    "update_ratio/": ("1", None),
    "act_rms/": ("rms", "lower"),
    "model_update": ("norm", "lower"),
    "output_logit_max": ("logit", "lower"),
    "log_z": ("nats", None),
}

OLMO_2 = "OLMo 2, arXiv 2501.00656, section 3.2"
MONITOR = "OLMo-core, StabilityMonitorCallback"
WORTSMAN = "Wortsman et al., arXiv 2309.14322, section 2.2"

METRICS: dict[str, Metric] = {
    "num_steps": Metric("steps recorded", "steps", "higher"),
    "first_grad_norm": Metric("the norm at step 1", "norm"),
    "start_grad_norm": Metric("median norm of the first 10 steps", "norm"),
    "peak_grad_norm": Metric("highest finite norm of a single step", "norm"),
    "peak_step": Metric("the step of the highest norm, the first if there are several", "step", None),
    "peak_grad_norm_mean_100": Metric(
        "highest mean norm over 100 steps (1 to 100, 101 to 200, ...), the view of fairseq's log", "norm"
    ),
    "median_grad_norm": Metric("median norm of all steps", "norm"),
    "peak_over_median_grad_norm": Metric("peak norm divided by median norm", "1"),
    "grad_norm_at_40_percent": Metric("median norm from 38 % to 42 % of the planned steps", "norm"),
    "end_grad_norm": Metric("median norm of the last tenth of the steps", "norm"),
    "settling_step": Metric(
        "first step from which the norm's medians over consecutive hundredths of the run (of five steps "
        "at least, counted back from the end) all stay within 25 % of the end level",
        "step",
    ),
    "spike_score_grad_norm": Metric(
        "percentage of norms at least 7 deviations from the mean of the last 1,000", "%", source=OLMO_2
    ),
    "num_spikes_grad_norm": Metric("the same, counted", "spikes", source=OLMO_2),
    "spike_steps_grad_norm": Metric("where they are, the first 100 of them", "steps", None, OLMO_2),
    "spike_score_loss": Metric(
        "percentage of losses at least 7 deviations from the mean of the last 1,000", "%", source=OLMO_2
    ),
    "num_spikes_loss": Metric("the same, counted", "spikes", source=OLMO_2),
    "spike_steps_loss": Metric("where they are, the first 100 of them", "steps", None, OLMO_2),
    "olmo_core_spike_fraction": Metric(
        "fraction of steps whose loss or norm exceeds the mean of the 128 before by 6 deviations",
        "1",
        source=MONITOR,
    ),
    "olmo_core_spike_fraction_last_10000": Metric("the same over the last 10,000 steps", "1", source=MONITOR),
    "clipped_fraction": Metric("fraction of steps taken whose norm was over the threshold", "1", None),
    "skipped_steps": Metric("updates that were attempted and not taken", "steps"),
    "loss_scale_drops": Metric("times that the fp16 loss scale fell", "drops"),
    "initial_loss": Metric("loss at step 1", "nats", None),
    "final_loss": Metric("mean loss of the last hundredth of the steps", "nats"),
    "best_loss": Metric("lowest mean loss of a hundredth of the steps", "nats"),
    "counted_loss": Metric(
        "final loss, at most the initial loss; a diverged trial counts as the initial loss",
        "nats",
        source=WORTSMAN,
    ),
    "best_val_loss": Metric("lowest validation loss", "nats"),
    "final_val_loss": Metric("last validation loss", "nats"),
    "num_nonfinite_loss": Metric("steps with a NaN or infinite loss", "steps"),
    "num_nonfinite_grad_norm": Metric("steps with a NaN or infinite norm", "steps"),
    "first_nonfinite_step": Metric("first step with a NaN or infinite loss or norm", "step", "higher"),
    "diverged_step": Metric(
        "where a diverged trial broke: the first non-finite loss, the beginning of the last stretch of "
        "non-finite norms, else the last step",
        "step",
        "higher",
    ),
    "diverged_reason": Metric("why it counts as diverged", "", None),
}

"""What a search seeks: from the numbers of a point's trials to one value, and from values to the best.

A point's value is the mean over its seeds. Divergence is a result: it counts as the initial loss where
the metric is a loss, else as the worst value there is, +inf or -inf, as does a number that a finished
trial doesn't have. NaN is never a value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from study.config import ConfigError, SearchSection, StudyConfig, trial_config
from study.metrics import METRICS, lr_sensitivity, metric_of
from study.spikes import SPIKE_SCORE

LR_SENSITIVITY = "lr_sensitivity"
LOSSES = ("final_loss", "best_loss", "counted_loss", "best_val_loss", "final_val_loss")
# They have a value only in trials that went wrong, so a search would take the lack of one as bad.
UNSUITABLE = ("first_nonfinite_step", "diverged_step", "diverged_reason", "num_steps")
COMPARED = ("finished", "diverged")  # statuses of trials that have a value

Row = Mapping[str, Any]  # a trial of the catalogue: status, summary, config, arm, arm_number


@dataclass(frozen=True)
class Objective:
    """A metric and which way is better."""

    metric: str
    mode: str  # min or max

    @property
    def worst(self) -> float:
        return math.inf if self.mode == "min" else -math.inf

    def value(self, trials: Sequence[Row]) -> float:
        """Of one point's trials, all finished or diverged: finite or `worst`, never NaN."""
        if self.metric == LR_SENSITIVITY:
            return self._sensitivity(trials)
        return float(np.mean([self._of_trial(trial) for trial in trials]))

    def _of_trial(self, trial: Row) -> float:
        summary = trial["summary"] or {}
        diverged = trial["status"] == "diverged"
        if diverged and self.metric not in LOSSES:
            return self.worst
        value = _float(summary.get("initial_loss" if diverged else self.metric))
        return value if math.isfinite(value) else self.worst

    def _sensitivity(self, trials: Sequence[Row]) -> float:
        rates = np.array([trial["config"]["optimizer"]["lr"] for trial in trials])
        summaries = [trial["summary"] or {} for trial in trials]
        losses = np.array([_float(summary.get("counted_loss")) for summary in summaries])
        initial = [one for summary in summaries if math.isfinite(one := _float(summary.get("initial_loss")))]
        found = lr_sensitivity(rates, losses, float(np.mean(initial))) if initial else None
        return self.worst if found is None else found


def _float(value: Any) -> float:
    return float(value) if is_finite(value) else math.nan


def is_finite(value: Any) -> bool:
    """Whether a number of a summary is one."""
    return isinstance(value, int | float) and math.isfinite(value)


def objectives_of(search: SearchSection) -> list[Objective]:
    """What a search seeks, one objective or two; none for a grid that names no metric.

    ConfigError for what no search can seek.
    """
    names = search.metrics or [search.metric or ("final_loss" if search.algorithm != "grid" else "")]
    modes: Sequence[str | None] = search.modes or [search.mode] * len(names)
    if len(set(names)) < len(names):
        raise ConfigError(f"metrics {names} are the same; two must differ (search.metrics)")
    return [_objective(name, mode) for name, mode in zip(names, modes, strict=True) if name]


def _objective(name: str, mode: str | None) -> Objective:
    where = "search: metric"
    if name == LR_SENSITIVITY:
        return Objective(name, mode or "min")
    if name in UNSUITABLE or name.startswith("spike_steps_"):
        raise ConfigError(f"metric '{name}' can't be sought: it has no value in a calm trial ({where})")
    try:
        better = metric_of(name).better
    except ValueError as error:
        raise ConfigError(f"{error}, {LR_SENSITIVITY} ({where})") from None
    if mode is None and better is None:
        raise ConfigError(f"metric '{name}' has no calmer side: say mode: min or max (search: mode)")
    return Objective(name, mode or ("min" if better == "lower" else "max"))


def check_search(study: StudyConfig, where: str) -> None:
    """ConfigError for a search whose settings have no effect, or whose metric could never have a value."""
    search = study.search
    place = f"{where}: search"
    for problem in _without_effect(search):
        raise ConfigError(f"{problem} ({place})")
    space = set(study.space) | {key for arm in study.arms for key in arm}
    trial = trial_config(study.trial, {}, f"{where}: trial")
    if search.lr_sweep is not None and "optimizer.lr" in space:
        raise ConfigError(f"optimizer.lr is swept by lr_sweep; leave it out of the space and arms ({place})")
    if search.scheduler != "none" and "steps" in space:
        raise ConfigError(
            f"scheduler {search.scheduler} compares trials at equal steps; steps can't differ ({place})"
        )
    if search.algorithm == "optuna" and any(key.split(".")[0] == "data" for key in study.space):
        raise ConfigError(f"losses on different data don't compare; data can be in arms only ({place})")
    for objective in objectives_of(search):
        if objective.metric.endswith("val_loss") and not trial.validation.period | (
            "validation.period" in space
        ):
            raise ConfigError(f"metric {objective.metric} needs trial.validation.period ({place})")
        needs = SPIKE_SCORE.needs if objective.metric.startswith(("spike_score", "num_spikes")) else 0
        if trial.steps < needs and "steps" not in space:
            raise ConfigError(
                f"metric {objective.metric} needs {needs:,} steps, has {trial.steps:,} ({place})"
            )


def _without_effect(search: SearchSection) -> list[str]:
    algorithm, found = search.algorithm, []
    if algorithm != "optuna" and search.sampler is not None:
        found.append(f"sampler {search.sampler} has no effect with algorithm {algorithm}; known: optuna")
    if algorithm == "grid":
        for name in ("num_samples", "points_to_evaluate", "sampler_seed"):
            if getattr(search, name) != SearchSection.model_fields[name].default:
                found.append(f"{name} has no effect with algorithm grid; known: random, optuna")
    elif search.num_samples is None:
        found.append(f"algorithm {algorithm} needs num_samples")
    elif len(search.points_to_evaluate) > search.num_samples:
        given = len(search.points_to_evaluate)
        found.append(f"{given} points_to_evaluate are more than num_samples {search.num_samples}")
    if search.metrics is not None and (search.metric is not None or search.mode is not None):
        found.append("metric and mode go together, or metrics and modes; both are given")
    if search.metrics is None and search.modes is not None:
        found.append("modes go with metrics; one metric has a mode")
    sweeps = LR_SENSITIVITY in (search.metric, *(search.metrics or []))
    if sweeps and search.lr_sweep is None:
        found.append(f"metric {LR_SENSITIVITY} needs lr_sweep, the learning rates that every point is run at")
    if search.lr_sweep is not None and not sweeps:
        found.append(f"lr_sweep has no effect without metric {LR_SENSITIVITY}")
    return found


def notes_of(study: StudyConfig) -> list[str]:
    """What a reader of the run must know from the beginning."""
    if study.search.scheduler == "none":
        return []
    return [
        f"scheduler {study.search.scheduler} was on: a trial that it stopped early, which is most often one "
        "that learns slowly, could have diverged later, and that is not seen"
    ]


def values_of(objectives: Sequence[Objective], trials: Sequence[Row]) -> list[float] | None:
    """The values of one point; None unless all of its trials finished or diverged."""
    if not trials or any(trial["status"] not in COMPARED for trial in trials):
        return None
    return [objective.value(trials) for objective in objectives]


def conclude(study: StudyConfig, rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """(results, notes) of a run's trials: the best point, or the Pareto front of two metrics.

    A point whose trials all diverged is never the best, and one without a finite value neither.
    """
    objectives = objectives_of(study.search)
    if not objectives:
        return {}, []
    found = []
    for number, trials in points(study.search, rows).items():
        values = values_of(objectives, trials)
        calm = any(trial["status"] == "finished" for trial in trials)
        if values is not None and calm and all(map(math.isfinite, values)):
            found.append({"arm_number": number, "arm": trials[0]["arm"], "values": values})
    results: dict[str, Any] = {
        "objectives": [{"metric": one.metric, "mode": one.mode} for one in objectives],
        "best": None,
    }
    signs = [1 if one.mode == "min" else -1 for one in objectives]
    if len(objectives) > 1:
        results["pareto"] = pareto_front(found, signs)
    elif found:
        results["best"] = min(found, key=lambda point: signs[0] * point["values"][0])
    notes = [_lacking(objective, rows) for objective in objectives]
    if not found and any(row["status"] in COMPARED for row in rows):
        notes.append("no arm has trials that all ended with a finite objective and one that did not diverge")
    return results, [note for note in notes if note]


def points(search: SearchSection, rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Trials by the number of their point's first arm: a point is one arm, or one a learning rate."""
    width = len(search.lr_sweep or [0])
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["arm_number"] // width * width, []).append(row)
    return found


def pareto_front(found: Sequence[dict[str, Any]], signs: Sequence[int]) -> list[dict[str, Any]]:
    """The points that no other point is at least as good as in all values and better in one."""
    costs = np.array(
        [[sign * value for sign, value in zip(signs, point["values"], strict=True)] for point in found]
    )
    front = []
    for point, cost in zip(found, costs, strict=True):
        dominated = ((costs <= cost).all(axis=1) & (costs < cost).any(axis=1)).any()
        if not dominated:
            front.append(point)
    return sorted(front, key=lambda point: signs[0] * point["values"][0])


def _lacking(objective: Objective, rows: Sequence[Row]) -> str:
    """A sentence about finished trials that don't have the metric."""
    finished = [row["summary"] or {} for row in rows if row["status"] == "finished"]
    lacking = [
        one for one in finished if objective.metric in METRICS and not is_finite(one.get(objective.metric))
    ]
    if not lacking:
        return ""
    reason = lacking[0].get("undefined", {}).get(objective.metric, "no value")
    return (
        f"{objective.metric} has no value in {len(lacking)} of {len(finished)} finished trials ({reason}); "
        "they count as the worst"
    )

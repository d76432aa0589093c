"""From a study to its trials: arms, grids and seeds, and what a trial takes of the cluster.

With worker.py, driver.py and run.py the only files that import Ray.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from study.config import ConfigError, StudyConfig, TrialConfig, trial_config


@dataclass(frozen=True)
class Plan:
    """One trial that is to be run."""

    number: int
    arm: str  # the label that pictures and tables show
    arm_number: int
    overrides: dict[str, Any]  # what this arm sets: dotted key -> value
    config: TrialConfig

    def trial_id(self, run_id: str) -> str:
        return f"{run_id}_{self.number:05d}"


def plan_trials(study: StudyConfig, where: str = "") -> list[Plan]:
    """All trials of a grid study: every arm times every point of the space, once a seed.

    Seeds vary slowest, so that a run that is cut short has compared all arms. ConfigError if
    anything in it can't be built.
    """
    plans: list[Plan] = []
    if study.arms or study.space:
        trial_config(study.trial, {}, f"{where}: trial")  # what is wrong there is no arm's fault
    first_seed = int(study.trial.get("seed", 0))
    for seed in range(first_seed, first_seed + study.search.seeds):
        for arm_number, (label, overrides) in enumerate(arms(study)):
            config = trial_config(study.trial, overrides | {"seed": seed}, f"{where}: arm '{label}'")
            plans.append(Plan(len(plans), label, arm_number, overrides, config))
    return plans


def arms(study: StudyConfig) -> list[tuple[str, dict[str, Any]]]:
    """(label, overrides) of every arm; a label is built from what differs where none is given."""
    found = []
    points = list(_grid(study.space))
    for arm in study.arms or [{}]:
        for point in points:
            overrides = {key: value for key, value in arm.items() if key != "label"} | point
            if "seed" in overrides:
                raise ConfigError("seeds are not an arm's matter: use search.seeds (arms: seed)")
            found.append((_label(study, arm.get("label"), overrides, point), overrides))
    labels = [label for label, _ in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two arms are labelled '{label}'; labels must differ (arms: label)")
    return found


def _grid(space: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for key, values in space.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"a grid's values must be a list that is not empty, got {values!r} (space: {key})"
            )
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


def _label(
    study: StudyConfig, given: str | None, overrides: Mapping[str, Any], point: Mapping[str, Any]
) -> str:
    differing = overrides if given is None else point
    parts = [f"{key.removeprefix('model.')}={_short(value)}" for key, value in differing.items()]
    return " | ".join(([given] if given is not None else []) + parts) or study.name


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} {_short(item)}" for key, item in value.items() if key != "name")
        return f"{value.get('name', '')} ({options})" if options else str(value.get("name", ""))
    return f"{value:g}" if isinstance(value, float) else str(value)


def trial_resources(study: StudyConfig, nodes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What one trial takes: as the study says, or one GPU where any node has one, else one core.

    `nodes` as ray.nodes() gives them. ConfigError if no node could ever hold one trial.
    """
    available = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    if study.resources == "auto":
        gpus = max((node.get("GPU", 0.0) for node in available), default=0.0)
        return {"CPU": 1.0, "GPU": 1.0} if gpus >= 1 else {"CPU": 1.0}
    wanted = {key.upper(): float(value) for key, value in study.resources.items()}
    if unknown := set(wanted) - {"CPU", "GPU"}:
        raise ConfigError(f"unknown resource '{sorted(unknown)[0].lower()}'; known: cpu, gpu (resources)")
    if not any(all(node.get(key, 0.0) >= value for key, value in wanted.items()) for node in available):
        has = "; ".join(f"cpu {node.get('CPU', 0):g}, gpu {node.get('GPU', 0):g}" for node in available)
        asked = ", ".join(f"{key.lower()} {value:g}" for key, value in wanted.items())
        raise ConfigError(f"a trial that takes {asked} fits on no node; the cluster has: {has} (resources)")
    return wanted

"""From a study to its trials: arms, points and seeds, and what a trial takes of the cluster.

With worker.py, driver.py and run.py the only files that import Ray.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from study.config import ConfigError, StudyConfig, TrialConfig, trial_config
from study.distributions import Params, Space
from study.objectives import check_search

CHECKED_POINTS = 64  # drawn before a search, to find what can't be built
MAX_REFUSED = 100  # points in a row that can't be built before a search gives up


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
    """All trials that are known before the run: every arm times every point, once a seed.

    Seeds vary slowest, so that a run that is cut short has compared all arms. None where Optuna
    suggests the points; what it may suggest is checked. ConfigError if anything can't be built.
    """
    check_search(study, where)
    plans: list[Plan] = []
    if study.search.algorithm != "grid":
        _check_points(study, where)
    if study.search.algorithm == "optuna":
        from study.samplers import check_sampler

        check_sampler(study.search)
        return plans
    for seed in seeds(study):
        for arm_number, (label, overrides) in enumerate(arms(study, where)):
            config = trial_config(study.trial, overrides | {"seed": seed}, f"{where}: arm '{label}'")
            plans.append(Plan(len(plans), label, arm_number, overrides, config))
    return plans


def seeds(study: StudyConfig) -> range:
    """The seeds that every arm is run with."""
    first = int(study.trial.get("seed", 0))
    return range(first, first + study.search.seeds)


def arms(study: StudyConfig, where: str = "") -> list[tuple[str, dict[str, Any]]]:
    """(label, overrides) of every arm; a label is built from what differs where none is given."""
    random = study.search.algorithm == "random"
    drawn = _drawn(study, where) if random else list(_grid(study.space))
    found = [one for arm in named_arms(study) for point in drawn for one in point_arms(study, *arm, point)]
    labels = Counter(label for label, _ in found)
    for label, count in labels.items():
        if count > 1:
            raise ConfigError(f"two arms are labelled '{label}'; labels must differ (arms: label)")
    return found


def named_arms(study: StudyConfig) -> list[tuple[str | None, dict[str, Any]]]:
    """(label, overrides) of the study's `arms`; one that sets nothing where there are none."""
    found = []
    for arm in study.arms or [{}]:
        overrides = {key: value for key, value in arm.items() if key != "label"}
        if "seed" in overrides or "seed" in study.space:
            raise ConfigError("seeds are not an arm's matter: use search.seeds (arms or space: seed)")
        if "workers" in overrides or "workers" in study.space:
            raise ConfigError("workers are not an arm's matter: use trial.workers (arms or space: workers)")
        label = arm.get("label")
        found.append((None if label is None else str(label), overrides))
    return found


def point_arms(
    study: StudyConfig, label: str | None, overrides: Mapping[str, Any], point: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """The arms that a point of the space makes of a named arm: one, or one a learning rate of the sweep."""
    found = []
    rates: Iterable[float | None] = study.search.lr_sweep or [None]
    for rate in rates:
        here = dict(point) if rate is None else {**point, "optimizer.lr": rate}
        found.append((_label(study, label, {**overrides, **here}, here), {**overrides, **here}))
    return found


def _drawn(study: StudyConfig, where: str) -> list[dict[str, Any]]:
    """Points at random, all different, that can be built with every arm."""
    space = Space(study.space)
    found: list[dict[str, Any]] = []
    refused = 0
    for _, point in space.random_points(study.search.sampler_seed, first_points(study, space)):
        error = _refusal(study, point, f"{where}: space")
        if error is None and point not in found:
            found.append(point)
            refused = 0
        else:
            problem, refused = str(error or "the space holds no more"), refused + 1
        if len(found) == study.search.num_samples:
            break
        if refused == MAX_REFUSED:
            raise ConfigError(
                f"only {len(found)} of {study.search.num_samples} points could be drawn: {problem}"
            )
    return found


def _refusal(study: StudyConfig, point: dict[str, Any], where: str) -> ConfigError | None:
    """Why a point can't be built with every arm."""
    try:
        for _, overrides in named_arms(study):
            trial_config(study.trial, overrides | point, where)
    except ConfigError as error:
        return error
    return None


def first_points(study: StudyConfig, space: Space) -> list[Params]:
    """The parameters of points_to_evaluate; ConfigError for one that the space does not hold."""
    return [space.encode(point, "search: points_to_evaluate") for point in study.search.points_to_evaluate]


def _check_points(study: StudyConfig, where: str) -> None:
    """ConfigError if a key or an option of the space is in no point, of many, that can be built."""
    space = Space(study.space)
    if not study.space:
        raise ConfigError(f"algorithm {study.search.algorithm} needs a space ({where}: space)")
    for params in first_points(study, space):
        draws = [next(space.random_points(seed, [params]))[1] for seed in range(5)]  # what it leaves open
        errors = [_refusal(study, point, f"{where}: search: points_to_evaluate") for point in draws]
        if error := min(errors, key=lambda one: one is not None):
            raise error
    built: set[tuple[str, str]] = set()
    refused: dict[tuple[str, str], ConfigError] = {}
    for params, point in itertools.islice(space.random_points(0), CHECKED_POINTS):
        parts = {(name, "" if isinstance(value, float) else str(value)) for name, value in params.items()}
        if error := _refusal(study, point, f"{where}: space"):
            refused |= dict.fromkeys(parts, error)
        else:
            built |= parts
    for part, error in refused.items():
        if part not in built:
            raise error


def _grid(space: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for key, values in space.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"a grid's values must be a list that is not empty, got {values!r}; "
                f"distributions need algorithm random or optuna (space: {key})"
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
        head = "import" if "import" in value else "name"
        options = ", ".join(f"{key} {_short(item)}" for key, item in value.items() if key != head)
        return f"{value.get(head, '')} ({options})" if options else str(value.get(head, ""))
    return f"{value:g}" if isinstance(value, float) else str(value)


def trial_resources(study: StudyConfig, nodes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What one worker of a trial takes: as the study says, or a GPU where any node has one, else a core.

    `nodes` as ray.nodes() gives them. ConfigError if the cluster could never hold one trial.
    """
    nodes = list(nodes)
    available = _alive(nodes)
    if study.resources == "auto":
        gpus = max((node.get("GPU", 0.0) for node in available), default=0.0)
        wanted = {"CPU": 1.0, "GPU": 1.0} if gpus >= 1 else {"CPU": 1.0}
    else:
        wanted = {key.upper(): float(value) for key, value in study.resources.items()}
    if unknown := set(wanted) - {"CPU", "GPU"}:
        raise ConfigError(f"unknown resource '{sorted(unknown)[0].lower()}'; known: cpu, gpu (resources)")
    workers = num_workers(study)
    if num_rooms(wanted, nodes) < workers:
        has = "; ".join(f"cpu {node.get('CPU', 0):g}, gpu {node.get('GPU', 0):g}" for node in available)
        asked = ", ".join(f"{key.lower()} {value:g}" for key, value in wanted.items())
        what = f"a trial that takes {asked} fits on no node"
        if workers > 1:
            what = f"a trial of {workers} workers that take {asked} each doesn't fit"
        raise ConfigError(f"{what}; the cluster has: {has} (resources)")
    return wanted


def num_workers(study: StudyConfig) -> int:
    """The processes of one trial; the same for all trials of a study."""
    return int(study.trial.get("workers", 1))


def num_rooms(wanted: Mapping[str, float], nodes: Iterable[Mapping[str, Any]]) -> int:
    """How many workers, each taking `wanted`, the cluster holds at once."""
    asked = {key: value for key, value in wanted.items() if value > 0}
    return sum(
        min((int(node.get(key, 0.0) / value + 1e-9) for key, value in asked.items()), default=sys.maxsize)
        for node in _alive(nodes)
    )


def _alive(nodes: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [dict(node["Resources"]) for node in nodes if node["Alive"]]

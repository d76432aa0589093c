"""Search without a cluster: what is drawn, what Optuna is told, and what is never drawn or told twice."""

import json
import math
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import optuna
import pytest
from driving import wait_for
from optuna.trial import TrialState
from ray.tune.search import Searcher

from study import search as search_module
from study.catalogue import Catalogue
from study.config import ConfigError, StudyConfig
from study.distributions import Space
from study.estimates import Estimate
from study.objectives import Objective, conclude, pareto_front
from study.rows import Job
from study.samplers import SAMPLERS
from study.search import Away, Search
from study.searcher import JobSearcher
from study.space import Plan, arms, plan_trials

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

LR = {"optimizer.lr": {"loguniform": [1e-5, 1.0]}}
RELAXED = {"model.relaxation": ["none", {"name": "softcap", "cap": {"uniform": [10, 50]}}]}


def study_of(space: dict[str, Any] = LR, **search: Any) -> StudyConfig:
    search = {"algorithm": "optuna", "num_samples": 6} | search
    arms = search.pop("arms", [])
    trial = search.pop("trial", {"steps": 30})
    return StudyConfig(name="planted", trial=trial, space=space, arms=arms, search=search)


def planted_loss(lr: float) -> float:
    """Best at 10^-2.3; above 0.3 a trial diverges."""
    return 2.0 + (math.log10(lr) + 2.3) ** 2


def outcome(plan: Plan) -> dict[str, Any]:
    """How a planted trial ends."""
    lr = plan.config.optimizer["lr"]
    loss = planted_loss(lr)
    summary = {"final_loss": loss, "initial_loss": 9.0, "counted_loss": min(loss, 9.0), "peak_grad_norm": lr}
    if lr > 0.3:
        summary |= {"final_loss": None, "counted_loss": 9.0}
    return {
        "id": plan.trial_id("planted"), "status": "diverged" if lr > 0.3 else "finished", "summary": summary,
        "config": plan.config.model_dump(), "arm": plan.arm, "arm_number": plan.arm_number,
    }  # fmt: skip


def same(plan: Plan) -> Plan:
    return plan


def run_points(search: Search[Plan], number: int | None = None) -> list[dict[str, Any]]:
    """Take points, `number` of them or all, and end their trials; the trials' rows."""
    rows = []
    while (number is None or len(rows) < number) and (plans := search.next()):
        for plan in plans:
            rows.append(outcome(plan))
            search.ended(rows[-1]["id"], rows[-1])
    return rows


def optuna_study(search: Search[Plan], arm: int = 0) -> optuna.Study:
    return search._studies[arm]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/gradnorm.db"


# The space


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loguniform": [1e-4]}, "loguniform takes [low, high], got [0.0001] (space: optimizer.lr)"),
        ({"uniform": [0.1, 0.1]}, "uniform takes a low end below its high end, got [0.1, 0.1]"),
        ({"uniform": [1, "two"]}, "uniform takes finite numbers, got [1, 'two']"),
        ({"uniform": [0, math.inf]}, "uniform takes finite numbers, got [0, inf]"),
        ({"loguniform": [0, 1]}, "loguniform [0, 1]: its low end must be over 0"),
        ({"quniform": [0.1, 0.5, 0.2]}, "quniform [0.1, 0.5, 0.2]: its ends must be multiples of 0.2"),
        ({"quniform": [0, 1, -0.5]}, "quniform [0, 1, -0.5]: its step must be over 0"),
        ({"randint": [1.5, 3]}, "randint [1.5, 3]: its ends must be whole numbers"),
        (
            {"logunifrom": [1, 2]},
            "unknown distribution 'logunifrom', did you mean 'loguniform'?; known: choice",
        ),
        ({"choice": []}, "a choice must be a list that is not empty, got []"),
        ({"choice": [1, 1]}, "two options are alike: 1"),
        (0.1, "a distribution must be a list or {word: [...]}, got 0.1; known: uniform, loguniform"),
    ],
)
def test_distribution_that_is_none_is_one_line(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Space({"optimizer.lr": given})
    assert said in str(caught.value) and "(space: optimizer.lr)" in str(caught.value)


def draws(space: Space, number: int = 300) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    random = space.random_points(0)
    return [next(random) for _ in range(number)]


def test_values_lie_where_rays_words_say() -> None:
    space = Space(
        {
            "u": {"uniform": [-1, 3]},
            "l": {"loguniform": [1e-4, 1e-1]},
            "q": {"quniform": [0.5, 2.0, 0.5]},
            "i": {"randint": [2, 5]},
            "c": {"choice": [True, None, "x"]},
        }  # fmt: skip
    )
    values = {key: [point[key] for _, point in draws(space)] for key in "uliqc"}
    assert -1 <= min(values["u"]) < -0.8 and 2.8 < max(values["u"]) <= 3
    assert 0.4 < np.mean(np.array(values["l"]) < 1e-4**0.5 * 1e-1**0.5) < 0.6
    assert set(values["q"]) == {0.5, 1.0, 1.5, 2.0}
    assert set(values["i"]) == {2, 3, 4}
    assert set(values["c"]) == {True, None, "x"}


def test_an_options_parameter_exists_only_where_the_option_is_chosen() -> None:
    seen = set()
    for params, point in draws(Space(RELAXED), 40):
        chosen = point["model.relaxation"]
        seen.add(params["model.relaxation"])
        if chosen == "none":
            assert params == {"model.relaxation": "none"}
        else:
            assert chosen == {"name": "softcap", "cap": params["model.relaxation.softcap.cap"]}
            assert 10 <= chosen["cap"] <= 50
    assert seen == {"none", "softcap"}


def test_every_point_can_be_given_back_as_parameters() -> None:
    space = Space(
        LR | RELAXED | {"clip.max_norm": {"quniform": [1, 4, 1]}, "batch_size": {"randint": [1, 9]}}
    )
    for params, point in draws(space, 40):
        assert space.encode(point, "here") == params


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ({"optimizer.lr": 2.0}, "2.0 is not between 1e-05 and 1 (here: optimizer.lr)"),
        ({"optimizer.rl": 0.1}, "unknown key 'optimizer.rl', did you mean 'optimizer.lr'?"),
        ({"model.relaxation": "pb_relax"}, "'pb_relax' is none of the options; known: none, softcap"),
        ({"model.relaxation": {"name": "softcap", "cap": 5}}, "5 is not between 10 and 50"),
    ],
)
def test_point_outside_the_space_is_refused(point: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Space(LR | RELAXED).encode(point, "here")
    assert said in str(caught.value)


# Random search


def test_random_search_gives_every_arm_the_same_points_and_every_point_all_seeds() -> None:
    named = [{"label": "a"}, {"label": "b", "clip.max_norm": 2.0}]
    plans = plan_trials(study_of(algorithm="random", num_samples=5, seeds=2, arms=named))
    assert len(plans) == 2 * 5 * 2
    rates = [plan.overrides["optimizer.lr"] for plan in plans if plan.config.seed == 0]
    assert rates[:5] == rates[5:] and len(set(rates)) == 5
    assert sorted((plan.arm_number, plan.config.seed) for plan in plans) == [
        (arm, seed) for arm in range(10) for seed in range(2)
    ]


def test_random_points_follow_from_their_seed() -> None:
    study = [study_of(algorithm="random", sampler_seed=seed) for seed in (0, 0, 1)]
    first, again, other = ([overrides for _, overrides in arms(one)] for one in study)
    assert first == again and not any(point in other for point in first)


def test_random_search_draws_no_point_twice_and_says_when_there_are_no_more() -> None:
    space = {"clip.max_norm": [1.0, 2.0, 3.0]}
    found = arms(study_of(space, algorithm="random", num_samples=3))
    assert sorted(overrides["clip.max_norm"] for _, overrides in found) == [1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match="only 3 of 4 points could be drawn: the space holds no more"):
        arms(study_of(space, algorithm="random", num_samples=4))


# What is refused before anything runs


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"algorithm": "grid"}, "num_samples has no effect with algorithm grid; known: random, optuna"),
        ({"num_samples": None}, "algorithm optuna needs num_samples"),
        ({"algorithm": "random", "sampler": "tpe"}, "sampler tpe has no effect with algorithm random"),
        ({"metric": "final_lss"}, "unknown metric 'final_lss', did you mean 'final_loss'?"),
        ({"metric": "diverged_step"}, "metric 'diverged_step' can't be sought"),
        ({"metric": "clipped_fraction"}, "metric 'clipped_fraction' has no calmer side: say mode"),
        ({"metric": "best_val_loss"}, "metric best_val_loss needs trial.validation.period"),
        ({"metric": "spike_score_loss"}, "metric spike_score_loss needs 1,000 steps, has 30"),
        ({"metrics": ["final_loss", "final_loss"]}, "are the same; two must differ"),
        ({"metrics": ["final_loss", "best_loss"], "mode": "min"}, "both are given"),
        ({"modes": ["min", "min"]}, "modes go with metrics"),
        ({"metric": "lr_sensitivity"}, "metric lr_sensitivity needs lr_sweep"),
        ({"lr_sweep": [0.1, 0.2]}, "lr_sweep has no effect without metric lr_sensitivity"),
        ({"metric": "lr_sensitivity", "lr_sweep": [0.1, 0.2]}, "optimizer.lr is swept by lr_sweep"),
        ({"points_to_evaluate": [{"optimizer.lr": 3}]}, "3 is not between 1e-05 and 1"),
        ({"points_to_evaluate": [{}] * 7}, "7 points_to_evaluate are more than num_samples 6"),
        ({"space": {}}, "algorithm optuna needs a space"),
        ({"space": {"data.name": ["stdlib"]}}, "losses on different data don't compare"),
        ({"space": {"seed": [1, 2]}}, "seeds are not an arm's matter"),
        ({"space": {"optimizer.rl": {"uniform": [0, 1]}}}, "unknown option of optimizer 'adamw' 'rl'"),
        ({"space": {"model.norm": ["rms", "lyer"]}}, "unknown norm 'lyer', did you mean 'layer'?"),
        ({"space": {"steps": [10, 20]}, "scheduler": "asha"}, "compares trials at equal steps"),
    ],
)
def test_search_that_can_not_be_is_refused_in_one_line(search: dict[str, Any], said: str) -> None:
    space = search.pop("space", LR)
    with pytest.raises(ConfigError) as caught:
        plan_trials(study_of(space, **search), "study.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_sampler_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        plan_trials(study_of(sampler="cmaes"))
    assert str(caught.value) == (
        "sampler cmaes needs the package cmaes; run: pip install 'gradnorm-study[cmaes]' (search: sampler)"
    )


def test_cmaes_knows_one_metric() -> None:
    with pytest.raises(ConfigError, match="sampler cmaes knows one metric"):
        plan_trials(study_of(sampler="cmaes", metrics=["final_loss", "peak_grad_norm"]))


# Objectives


def trial(status: str = "finished", **summary: Any) -> dict[str, Any]:
    return {"status": status, "summary": summary or None, "arm": "a", "arm_number": 0, "config": {}}


def test_value_is_the_mean_over_seeds_and_a_diverged_loss_is_the_initial_one() -> None:
    trials = [trial(final_loss=2.0), trial("diverged", final_loss=None, initial_loss=5.0)]
    assert Objective("final_loss", "min").value(trials) == 3.5


@pytest.mark.parametrize(
    "trials",
    [
        [trial("diverged", peak_grad_norm=1.0)],
        [trial(peak_grad_norm=1.0), trial(peak_grad_norm=None)],
        [trial(peak_grad_norm=math.nan)],
        [trial("diverged")],
    ],
)
def test_what_has_no_value_is_worse_than_anything_but_never_nan(trials: list[dict[str, Any]]) -> None:
    assert Objective("peak_grad_norm", "min").value(trials) == math.inf
    assert Objective("peak_grad_norm", "max").value(trials) == -math.inf


def test_lr_sensitivity_of_a_point_is_that_of_its_sweep() -> None:
    """Losses 2, 3 and a divergence at 6: excesses 0, 1, 4 over the best, their mean 5/3."""
    rows = [
        trial("finished", counted_loss=2.0, initial_loss=6.0),
        trial("finished", counted_loss=3.0, initial_loss=6.0),
        trial("diverged", counted_loss=6.0, initial_loss=6.0),
    ]
    for row, lr in zip(rows, (1e-3, 1e-2, 1e-1), strict=True):
        row["config"] = {"optimizer": {"lr": lr}}
    assert Objective("lr_sensitivity", "min").value(rows) == pytest.approx(5 / 3)


def test_pareto_front_is_what_nothing_dominates() -> None:
    random = np.random.default_rng(0)
    points = [{"arm_number": n, "values": list(random.integers(0, 8, 2))} for n in range(40)]

    def dominated(point: dict[str, Any]) -> bool:  # smaller first value, larger second value is better
        a, b = point["values"]
        return any(x <= a and y >= b and (x < a or y > b) for x, y in (other["values"] for other in points))

    front = pareto_front(points, [1, -1])
    assert {point["arm_number"] for point in front} == {p["arm_number"] for p in points if not dominated(p)}


def test_run_in_which_everything_diverged_has_no_best_and_says_so() -> None:
    rows = [trial("diverged", initial_loss=5.0, final_loss=None)]
    results, notes = conclude(study_of(), rows)
    assert results["best"] is None
    assert notes == ["no arm has trials that all ended with a finite objective and one that did not diverge"]
    json.dumps(results, allow_nan=False)


# Optuna


def test_tpe_finds_a_better_rate_than_the_median_of_random_search() -> None:
    """Through Tune's searcher, 40 trials each, two at a time, ten repeats: in 8 at least."""
    random = []
    for seed in range(21):
        points = Space(LR).random_points(seed)
        random.append(min(min(planted_loss(next(points)[1]["optimizer.lr"]), 9.0) for _ in range(40)))
    better = 0
    for seed in range(10):
        study = study_of(num_samples=40, sampler_seed=seed)
        search = Search(study, "planted", None, lambda plan: Job(plan, Estimate(0, 0, [])))
        searcher = JobSearcher([], lambda job: {}, search=search, max_concurrent=2)
        values: list[float] = []
        waiting: list[str] = []
        number = 0
        while True:
            number += 1
            suggested = searcher.suggest(f"t{number}")
            if suggested == Searcher.FINISHED and not waiting:
                break
            if isinstance(suggested, dict):
                waiting.append(f"t{number}")
            else:
                tune_id = waiting.pop(0)
                row = outcome(searcher.running[tune_id].plan)
                values.append(_counted(row))
                details = json.dumps({"status": row["status"], "summary": row["summary"]})
                searcher.on_trial_complete(tune_id, {"details": details})
        assert len(values) == 40
        better += min(values) < np.median(random)
    assert better >= 8


def _counted(row: dict[str, Any]) -> float:
    return row["summary"]["counted_loss"]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("two", [False, True], ids=["one metric", "two"])
def test_search_in_which_all_diverge_ends_as_it_should(name: str, two: bool) -> None:
    if two and name == "cmaes":
        return  # it is refused
    sought = {"metrics": ["final_loss", "peak_grad_norm"]} if two else {"metric": "peak_grad_norm"}
    study = study_of(LR | RELAXED, sampler=name, num_samples=12, **sought)
    search = Search(study, "planted", None, same)
    count = 0
    while plans := search.next():
        for plan in plans:
            search.ended(plan.trial_id("planted"), outcome(plan) | {"status": "diverged", "summary": None})
            count += 1
    assert count == 12
    for told in optuna_study(search).trials:
        assert told.state == TrialState.COMPLETE and told.values == [math.inf] * (2 if two else 1)


def test_optuna_knows_a_point_by_its_mean_over_seeds(url: str) -> None:
    search = Search(study_of(seeds=3), "planted", url, same)
    plans = search.next()
    assert [plan.config.seed for plan in plans] == [0, 1, 2]
    assert len({plan.arm_number for plan in plans}) == 1
    for plan, loss in zip(plans, (1.0, 2.0, 6.0), strict=True):
        assert optuna_study(search).trials[0].state == TrialState.RUNNING
        search.ended(plan.trial_id("planted"), outcome(plan) | {"summary": {"final_loss": loss}})
    assert optuna_study(search).trials[0].values == [3.0]
    loaded = optuna.load_study(study_name="planted", storage=url)
    assert loaded.trials[0].user_attrs == {"point": 0, "arm_numbers": [0]}


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        (["finished", "failed"], TrialState.FAIL),
        (["pruned", "failed"], TrialState.FAIL),
        (["finished", "pruned"], TrialState.PRUNED),
    ],
)
def test_optuna_is_told_what_has_no_value(statuses: list[str], state: TrialState) -> None:
    search = Search(study_of(seeds=2), "planted", None, same)
    for plan, status in zip(search.next(), statuses, strict=True):
        search.ended(plan.trial_id("planted"), outcome(plan) | {"status": status})
    assert optuna_study(search).trials[0].state == state


def test_every_arm_has_an_optuna_study_and_its_number_of_points(url: str) -> None:
    named = [{"label": "a"}, {"label": "b", "clip.max_norm": 2.0}]
    search = Search(study_of(arms=named, num_samples=3), "planted", url, same)
    rows = run_points(search)
    assert [row["arm_number"] for row in rows] == list(range(6))
    assert sorted(optuna.get_all_study_names(url)) == ["planted: a", "planted: b"]
    assert [len(optuna_study(search, arm).trials) for arm in (0, 1)] == [3, 3]


def test_lr_sweep_makes_an_arm_a_rate_of_every_point() -> None:
    study = study_of(
        {"clip.max_norm": {"uniform": [1, 2]}}, metric="lr_sensitivity", lr_sweep=[1e-3, 1e-2], seeds=2
    )
    search = Search(study, "planted", None, same)
    plans = search.next()
    assert [(p.arm_number, p.config.optimizer["lr"], p.config.seed) for p in plans] == [
        (0, 1e-3, 0), (0, 1e-3, 1), (1, 1e-2, 0), (1, 1e-2, 1),
    ]  # fmt: skip
    for plan in plans:
        search.ended(plan.trial_id("planted"), outcome(plan))
    losses = np.array([planted_loss(1e-3), planted_loss(1e-2)])
    assert optuna_study(search).trials[0].values == pytest.approx([(losses - losses.min()).mean()])


def test_points_to_evaluate_come_first_and_once(url: str) -> None:
    study = study_of(points_to_evaluate=[{"optimizer.lr": 0.01}, {"optimizer.lr": 0.02}])
    rows = run_points(Search(study, "planted", url, same), 1)
    rows += run_points(Search(study, "planted", url, same, rows))
    rates = [row["config"]["optimizer"]["lr"] for row in rows]
    assert rates[:2] == [0.01, 0.02] and len(set(rates)) == len(rates) == 6


@pytest.mark.parametrize("name", ["tpe", "gp", "cmaes", "qmc"])
def test_cut_search_suggests_what_the_undisturbed_one_does(name: str, url: str) -> None:
    study = study_of(sampler=name, num_samples=12)
    whole = run_points(Search(study, "planted", None, same))
    rows: list[dict[str, Any]] = []
    for _ in range(2):
        rows += run_points(Search(study, "planted", url, same, rows), 6)
    assert [row["config"] for row in rows] == [row["config"] for row in whole]
    assert [row["arm_number"] for row in rows] == list(range(12))
    assert len({row["config"]["optimizer"]["lr"] for row in rows}) == 12


def test_qmc_spreads_its_points_evenly() -> None:
    """Sixteen points of one Sobol sequence: one in each sixteenth. The first point isn't of it."""
    rows = run_points(Search(study_of(sampler="qmc", num_samples=17), "planted", None, same))
    place = [(math.log10(row["config"]["optimizer"]["lr"]) + 5) / 5 for row in rows[1:]]
    assert sorted(int(16 * one) for one in place) == list(range(16))


def test_killed_driver_leaves_every_point_to_its_resume(url: str) -> None:
    """At the kill: one point told; one ended but untold; one half ended; one not even in the catalogue."""
    study = study_of(seeds=2)
    killed = Search(study, "planted", url, same)
    told, untold, half, unknown = (killed.next() for _ in range(4))
    for plan in told:
        killed.ended(plan.trial_id("planted"), outcome(plan))
    rows = [outcome(plan) for plan in (*told, *untold, *half)]
    rows[-1] |= {"status": "running", "summary": None}

    resumed = Search(study, "planted", url, same, rows)
    states = [one.state for one in optuna_study(resumed).trials]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.RUNNING, TrialState.RUNNING]
    assert resumed.left == 1 + 2
    resumed.ended(half[1].trial_id("planted"), outcome(half[1]))
    again = resumed.next()
    assert [plan.overrides for plan in again] == [plan.overrides for plan in unknown]
    assert [plan.number for plan in again] == [plan.number for plan in unknown] == [6, 7]
    for plan in again:
        resumed.ended(plan.trial_id("planted"), outcome(plan))
    run_points(resumed)
    trials = optuna_study(resumed).trials
    assert [one.state for one in trials] == [TrialState.COMPLETE] * 6
    assert [one.user_attrs["point"] for one in trials] == list(range(6))


def test_suggestion_that_was_cut_off_half_made_is_gone_on_with(url: str) -> None:
    """Killed after Optuna gave out a given point, before it was marked as a point of the run."""
    study = study_of(LR | RELAXED, points_to_evaluate=[{"optimizer.lr": 0.01}])
    optuna_study(Search(study, "planted", url, same)).ask()
    rows = run_points(Search(study, "planted", url, same))
    assert len(rows) == 6 and rows[0]["config"]["optimizer"]["lr"] == 0.01
    assert len(optuna.load_study(study_name="planted", storage=url).trials) == 6


def test_failed_trial_that_a_resume_completes_counts(url: str) -> None:
    study = study_of(num_samples=2)
    first = Search(study, "planted", url, same)
    (plan,) = first.next()
    failed = outcome(plan) | {"status": "failed", "summary": None}
    first.ended(failed["id"], failed)
    resumed = Search(study, "planted", url, same, [failed])
    resumed.ended(failed["id"], outcome(plan))
    assert len(run_points(resumed)) == 1
    values = [(one.user_attrs["point"], one.values) for one in optuna_study(resumed).trials if one.values]
    assert values[0] == (0, [outcome(plan)["summary"]["final_loss"]])
    assert [point for point, _ in values] == [0, 1]
    assert Search(study, "planted", url, same, [outcome(plan)]).left == 0


def test_history_that_is_gone_is_refused(url: str) -> None:
    rows = run_points(Search(study_of(), "planted", None, same), 1)
    with pytest.raises(ConfigError, match="the search history of run 'planted' is gone"):
        Search(study_of(), "planted", url, same, rows)


def test_points_that_can_not_be_built_are_told_and_others_asked_for() -> None:
    def picky(plan: Plan) -> Plan:
        if plan.config.optimizer["lr"] < 1e-2:
            raise ConfigError("too small")
        return plan

    search = Search(study_of(), "planted", None, picky)
    rows = run_points(search)
    assert len(rows) == 6 and all(row["config"]["optimizer"]["lr"] >= 1e-2 for row in rows)
    refused = [one for one in optuna_study(search).trials if one.state == TrialState.FAIL]
    assert refused and all(one.user_attrs == {"refused": "too small"} for one in refused)
    assert [row["arm_number"] for row in rows] == list(range(6))


def test_search_that_finds_nothing_to_build_ends_and_says_why() -> None:
    def never(plan: Plan) -> Plan:
        raise ConfigError("no such thing")

    search = Search(study_of(), "planted", None, never)
    assert search.next() == [] and search.left == 0
    assert search.notes == [
        "the search ended after 0 of 6 points: 100 suggestions in a row could not be built (no such thing)"
    ]


@pytest.fixture
def locked(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Search[Plan], sqlite3.Connection]]:
    """A search, and another connection that can lock its database."""
    monkeypatch.setattr(search_module, "LOCK_SECONDS", 0.05)
    search = Search(study_of(num_samples=3), "planted", url, same)
    with sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None) as connection:
        yield search, connection


def test_database_that_is_away_costs_a_search_nothing(
    locked: tuple[Search[Plan], sqlite3.Connection],
) -> None:
    search, connection = locked
    (plan,) = search.next()
    connection.execute("begin exclusive")
    search.ended(plan.trial_id("planted"), outcome(plan))
    for _ in range(3):
        with pytest.raises(Away):
            search.next()
    connection.execute("rollback")
    assert len(run_points(search)) == 2
    assert [one.state for one in optuna_study(search).trials] == [TrialState.COMPLETE] * 3


def test_server_that_restarts_costs_a_search_nothing(postgresql_server: Any) -> None:
    """Two points are out as PostgreSQL goes away; one ends meanwhile; nothing is lost or asked twice."""
    search = Search(study_of(num_samples=4), "planted", postgresql_server.new_database(), same)
    (first,), (second,) = search.next(), search.next()
    postgresql_server.stop()
    try:
        search.ended(first.trial_id("planted"), outcome(first))
        for _ in range(3):
            with pytest.raises(Away):
                search.next()
        assert search.left == 2
    finally:
        postgresql_server.start()
    search.ended(second.trial_id("planted"), outcome(second))
    assert [row["arm_number"] for row in run_points(search)] == [2, 3]
    assert [one.state for one in optuna_study(search).trials] == [TrialState.COMPLETE] * 4


@pytest.mark.alone
def test_optuna_dashboard_shows_a_search_from_its_database(url: str, tmp_path: Path) -> None:
    """Its own command on its own port, asked as its page asks; the run's tables lie in the same file."""
    catalogue = Catalogue(url)
    catalogue.migrate()
    search = Search(study_of(LR | RELAXED, num_samples=12), "planted", url, same)
    rows = run_points(search, 11)
    search.next()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).parent / "optuna-dashboard",
        url,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: _answers(process, address, tmp_path / "log"), 60)
        (study,) = httpx.get(f"{address}/api/studies").json()["study_summaries"]
        assert study["study_name"] == "planted"
        shown = httpx.get(f"{address}/api/studies/{study['study_id']}").json()
        assert httpx.get(f"{address}/dashboard").status_code == 200
    finally:
        process.terminate()
        process.wait()
    assert shown["objective_names"] == ["final_loss"] and shown["directions"] == ["minimize"]
    assert [one["state"] for one in shown["trials"]] == ["Complete"] * 11 + ["Running"]
    for trial, row in zip(shown["trials"], rows, strict=False):
        params = {param["name"]: param["param_internal_value"] for param in trial["params"]}
        assert params["optimizer.lr"] == row["config"]["optimizer"]["lr"]
        loss = row["summary"]["final_loss"]
        value = row["summary"]["counted_loss"] if loss is None else loss
        assert trial["values"] == [pytest.approx(value)]


def _answers(process: subprocess.Popen[bytes], address: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return httpx.get(f"{address}/api/meta").status_code == 200
    except httpx.TransportError:
        return False


def test_searcher_keeps_to_its_limit_and_begins_nothing_after_its_time() -> None:
    plans = plan_trials(study_of(algorithm="random", num_samples=3))
    jobs = [Job(plan, Estimate(0, 0, [])) for plan in plans]
    searcher = JobSearcher(jobs, lambda job: {"number": job.plan.number}, max_concurrent=1, time_budget=60)
    assert searcher.suggest("a") == {"job": {"number": 0}}
    assert searcher.suggest("b") is None
    searcher.on_trial_complete("a", {"details": "{}"})
    assert searcher.suggest("b") == {"job": {"number": 1}}
    searcher.on_trial_complete("b", error=True)
    searcher.ends_at = time.monotonic()
    assert searcher.suggest("c") == Searcher.FINISHED


def test_time_that_ends_a_search_is_said_in_its_notes() -> None:
    search = Search(study_of(), "planted", None, lambda plan: Job(plan, Estimate(0, 0, [])))
    searcher = JobSearcher([], lambda job: {}, search=search, time_budget=60)
    searcher.suggest("a")
    assert searcher.points_left() == 5 and not search.notes
    searcher.ends_at = time.monotonic()
    assert searcher.points_left() == 0
    assert search.notes == ["the time budget ended the search, 5 points before its end"]


def test_points_with_the_same_settings_have_labels_of_their_own() -> None:
    search = Search(study_of({"clip.max_norm": [1.0, 2.0]}, num_samples=8), "planted", None, same)
    labels = [row["arm"] for row in run_points(search)]
    assert len(set(labels)) == 8 and labels[0].startswith("clip.max_norm=")

"""From a study to its trials: every arm, point and seed once, each with a label of its own."""

from typing import Any

import pytest

from study.config import ConfigError, StudyConfig, load_study
from study.space import num_rooms, plan_trials, trial_resources


def study(**sections: Any) -> StudyConfig:
    return StudyConfig.model_validate({"name": "asked", **sections})


def labels(**sections: Any) -> list[str]:
    return [plan.arm for plan in plan_trials(study(**sections))]


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ray.nodes() tells it."""
    return {
        "NodeID": "8f5e1c", "Alive": alive, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "worker",
        "Resources": {"node:10.0.0.1": 1.0, "memory": 8e9, "object_store_memory": 1e8, **resources},
        "Labels": {"ray.io/node-id": "8f5e1c"},
    }  # fmt: skip


def test_seeds_vary_slowest_so_that_a_run_cut_short_has_compared_all_arms() -> None:
    plans = plan_trials(load_study("figure", ["search.seeds=3", "trial.seed=5"]))
    assert [plan.config.seed for plan in plans] == [5] * 4 + [6] * 4 + [7] * 4
    assert [plan.arm_number for plan in plans] == [0, 1, 2, 3] * 3
    assert [plan.number for plan in plans] == list(range(12))
    assert plans[11].trial_id("figure-1") == "figure-1_00011"
    assert len({plan.arm for plan in plans}) == 4
    for first, again in zip(plans[:4], plans[4:8], strict=True):
        assert first.config.model_copy(update={"seed": 6}) == again.config


def test_a_grid_is_every_combination_with_every_arm() -> None:
    plans = plan_trials(
        study(
            arms=[{"clip.max_norm": 10.0}, {"clip": "none"}],
            space={"optimizer.lr": [1e-3, 1e-2], "model.norm": ["layer", "rms"]},
        )
    )
    found = {(p.config.clip["name"], p.config.optimizer["lr"], p.config.model.norm["name"]) for p in plans}
    assert len(plans) == len(found) == 8 == len({plan.arm for plan in plans})
    assert found == {
        (clip, lr, norm)
        for clip in ("global_norm", "none")
        for lr in (1e-3, 1e-2)
        for norm in ("layer", "rms")
    }
    assert plans[0].overrides == {"clip.max_norm": 10.0, "optimizer.lr": 1e-3, "model.norm": "layer"}


def test_a_label_is_what_was_given_or_what_differs() -> None:
    given = {"label": "Run 1", "clip.max_norm": 10.0}
    assert labels(arms=[given]) == ["Run 1"]
    assert labels(arms=[{"clip.max_norm": 10.0}, {"model.block": "deepnorm"}]) == [
        "clip.max_norm=10",
        "block=deepnorm",
    ]
    assert labels(arms=[{"clip.max_norm": 1e-3, "model.block": "post"}]) == [
        "clip.max_norm=0.001 | block=post"
    ]
    assert labels(arms=[given], space={"optimizer.lr": [1e-3, 3e-2]}) == [
        "Run 1 | optimizer.lr=0.001",
        "Run 1 | optimizer.lr=0.03",
    ]
    relaxed = {"name": "pb_relax", "alpha": 32.0}
    assert labels(arms=[{"model.relaxation": relaxed}]) == ["relaxation=pb_relax (alpha 32)"]
    assert labels() == ["asked"]


def test_a_label_never_carries_the_seed_and_two_arms_never_share_one() -> None:
    assert labels(search={"seeds": 2}) == ["asked", "asked"]
    with pytest.raises(ConfigError, match="two arms are labelled 'same'; labels must differ"):
        labels(arms=[{"label": "same"}, {"label": "same", "clip": "none"}])


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"arms": [{"seed": 3}]}, "seeds are not an arm's matter: use search.seeds"),
        ({"space": {"seed": [1, 2]}}, "seeds are not an arm's matter: use search.seeds"),
        ({"arms": [{"workers": 2}]}, "workers are not an arm's matter: use trial.workers"),
        ({"space": {"workers": [1, 2]}}, "workers are not an arm's matter: use trial.workers"),
        ({"space": {"optimizer.lr": []}}, r"a grid's values must be a list that is not empty, got \[\]"),
        ({"space": {"optimizer.lr": 3}}, r"a grid's values must be a list .*, got 3.* \(space: optimizer.lr\)"),
        ({"arms": [{"clip.max_nrom": 3}]}, "unknown option of clip 'global_norm' 'max_nrom', did you mean"),
        ({"arms": [{"label": "wide", "model.d_modle": 3}]}, "unknown key 'd_modle', did.*arm 'wide'"),
        ({"trial": {"stesp": 3}, "arms": [{"clip": "none"}]}, r"'stesp', did you mean 'steps'.*trial\.stesp\)"),
    ],
)  # fmt: skip
def test_what_can_not_be_planned_is_refused_with_its_place(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_trials(study(**sections), "study.yaml")


def test_a_trial_takes_a_gpu_where_the_cluster_has_one_and_else_a_core() -> None:
    cpu, gpu = node(CPU=2.0), node(**{"CPU": 16.0, "GPU": 8.0, "accelerator_type:H200": 1.0})
    assert trial_resources(study(), [cpu]) == {"CPU": 1.0}
    assert trial_resources(study(), [cpu, gpu]) == {"CPU": 1.0, "GPU": 1.0}
    assert trial_resources(study(), [cpu, gpu | {"Alive": False}]) == {"CPU": 1.0}
    assert trial_resources(study(resources={"cpu": 2, "gpu": 0.25}), [gpu]) == {"CPU": 2.0, "GPU": 0.25}
    assert trial_resources(study(resources={"cpu": 2}), [gpu]) == {"CPU": 2.0}


def test_what_no_node_could_ever_hold_is_refused_with_what_the_cluster_has() -> None:
    nodes = [node(CPU=2.0), node(CPU=8.0, GPU=1.0), node(alive=False, CPU=64.0, GPU=8.0)]
    with pytest.raises(ConfigError) as caught:  # 10 cores are there, but not on one node
        trial_resources(study(resources={"cpu": 9}), nodes)
    assert str(caught.value) == (
        "a trial that takes cpu 9 fits on no node; the cluster has: cpu 2, gpu 0; cpu 8, gpu 1 (resources)"
    )
    with pytest.raises(ConfigError, match="cpu 1, gpu 2 fits on no node"):
        trial_resources(study(resources={"cpu": 1, "gpu": 2}), nodes)
    with pytest.raises(ConfigError, match="unknown resource 'cpus'; known: cpu, gpu"):
        trial_resources(study(resources={"cpus": 2}), nodes)


def test_as_many_trials_fit_as_the_nodes_hold_one_by_one() -> None:
    nodes = [node(CPU=3.0), node(CPU=3.0, GPU=1.0), node(alive=False, CPU=64.0)]
    assert num_rooms({"CPU": 1.0}, nodes) == 6
    assert num_rooms({"CPU": 2.0}, nodes) == 2  # 6 cores, but 1 is left over on each node
    assert num_rooms({"CPU": 1.0, "GPU": 0.25}, nodes) == 3
    assert num_rooms({"CPU": 1.0, "GPU": 1.0}, nodes) == 1


@pytest.mark.parametrize("seed", ["abc", 1.5, -1])
def test_a_seed_that_is_no_whole_number_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="trial.seed"):
        plan_trials(StudyConfig(name="x", trial={"seed": seed}))

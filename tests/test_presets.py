"""Every preset is a study that can be run: it parses, says what it is, builds, and trains."""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from study.claims import check
from study.config import PRESETS, ConfigError, StudyConfig, TrialConfig, load_study, presets, trial_config
from study.estimates import estimate
from study.selectors import flatten
from study.space import arms
from study.train import train

if TYPE_CHECKING:
    from study.data import Tokens

ROOT = Path(__file__).parent.parent
HEADER = ("Question", "Run", "Cost", "Expect", "Source")
TESTED = [name for name in presets() if "profiles" in (PRESETS / f"{name}.yaml").read_text()]
TINY = {
    "model.d_model": 16, "model.num_layers": 2, "model.num_heads": 2, "model.context_length": 8,
    "model.d_ff": 16, "batch_size": 2, "steps": 2, "record.period": 1,
}  # fmt: skip


@pytest.mark.parametrize("preset", presets())
def test_a_preset_says_what_it_asks_costs_and_rests_on(preset: str) -> None:
    lines = (PRESETS / f"{preset}.yaml").read_text().splitlines()[: len(HEADER)]
    for line, word in zip(lines, HEADER, strict=True):
        assert line.startswith(f"# {word}:") and len(line) > 20
    assert f"python study/run.py {preset}" in lines[1]
    assert "last reproduced:" in lines[4]
    assert f"`{preset}`" in (ROOT / "README.md").read_text()


def resolved(study: StudyConfig) -> list[tuple[str, TrialConfig]]:
    return [(label, trial_config(study.trial, overrides, label)) for label, overrides in arms(study)]


def work(study: StudyConfig) -> float:
    """About proportional to the multiplications of a run."""
    return study.search.seeds * sum(
        config.steps * config.batch_size * config.model.context_length * config.model.num_layers
        * config.model.d_model**2
        for _, config in resolved(study)
    )  # fmt: skip


@pytest.mark.parametrize("preset", presets())
def test_every_claim_of_a_preset_has_a_source_and_arms(preset: str) -> None:
    study = load_study(preset)
    judged = [
        {"label": label, "fields": flatten(config.model_dump(mode="json")), "trials": []}
        for label, config in resolved(study)
    ]
    claims = check(study.claims, judged)  # refuses a claim about an arm that the run lacks
    assert claims and all(claim.source and claim.say for claim in claims)


@pytest.mark.parametrize("preset", TESTED)
def test_the_long_form_of_a_preset_is_the_same_study_and_longer(preset: str) -> None:
    short, long = load_study(preset), load_study(preset, profile="gpu")
    assert long.claims == short.claims and len(resolved(long)) >= len(resolved(short))
    assert work(long) > 10 * work(short)


@pytest.mark.parametrize("preset", presets())
def test_every_arm_of_a_preset_trains_two_shrunk_steps(preset: str, text: "Tokens") -> None:
    study = load_study(preset)
    done: set[str] = set()
    for label, overrides in arms(study, preset):
        config = trial_config(study.trial, {**overrides, **TINY}, label)
        key = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        if key in done:  # arms that differed in size alone
            continue
        done.add(key)
        estimate(config, text, label)
        reports = list(train(config, text))
        assert reports[-1].status == "finished" and reports[-1].step == 2
        assert [step for report in reports for step in report.rows["step"]] == [1, 2]
    assert done


def test_a_profile_comes_between_the_file_and_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trial: {steps: 5, seed: 1}\nprofiles: {long: {trial.steps: 50, trial.batch_size: 3}}\n")
    assert load_study(str(file)).trial == {"steps": 5, "seed": 1}
    assert load_study(str(file), profile="long").trial == {"steps": 50, "seed": 1, "batch_size": 3}
    assert load_study(str(file), ["trial.steps=7"], "long").trial["steps"] == 7


def test_an_unknown_profile_is_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown profile 'gup', did you mean 'gpu'\?; known: gpu \(study"):
        load_study("warmup", profile="gup")
    with pytest.raises(ConfigError, match=r"unknown profile 'gpu'; known: none \("):
        load_study("figure", profile="gpu")
    file = tmp_path / "mine.yaml"
    file.write_text("profiles: {long: 3}\n")
    with pytest.raises(ConfigError, match=r"profiles.long"):
        load_study(str(file), profile="long")


def recorded(config: Any, text: "Tokens", state: dict[str, Any] | None = None) -> tuple[list[Any], Any]:
    reports, state_at = [], None
    for report in train(config, text, state=state, flush_seconds=0.0):
        reports.append(report)
        if report.step == 3:
            state_at = copy.deepcopy(report.state())
    return reports, state_at


def column(reports: list[Any], name: str) -> np.ndarray:
    return np.ma.concatenate([report.rows[name] for report in reports])


def test_the_model_update_grows_from_the_first_step_and_survives_a_resume(shrink: Any, text: Any) -> None:
    config = shrink({"record.model_update": True, "record.period": 1}, steps=6)
    reports, state = recorded(config, text)
    whole = column(reports, "model_update")
    assert whole[0] > 0 and whole[-1] > whole[0]
    assert np.allclose(column(reports, "log_z")[0], np.log(256), atol=0.1)
    resumed, _ = recorded(config, text, state)
    np.testing.assert_array_equal(column(resumed, "model_update"), whole[3:])


def test_the_model_update_is_that_of_the_metric_and_changes_nothing_else(shrink: Any, text: Any) -> None:
    import torch

    from study.metrics import model_update
    from study.train import Trial

    settings = {"record.model_update": True, "record.activations": True, "record.period": 1}
    trial = Trial(shrink(settings, steps=3), text, torch.device("cpu"))
    plain = Trial(
        shrink({"record.activations": True, "record.period": 1}, steps=3), text, torch.device("cpu")
    )
    assert trial.probe is not None
    tokens = trial.probe.tokens_BxT
    before = trial.model(tokens).detach().numpy()
    trial.run_step()
    after = trial.model(tokens).detach().numpy()
    rows = trial.recorder.flush()
    assert rows["model_update"][0] == pytest.approx(model_update(before, after), rel=1e-5)
    plain.run_step()
    for name, values in plain.recorder.flush().items():
        np.testing.assert_array_equal(rows[name], values)

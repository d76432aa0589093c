"""A study is complete and buildable, or refused in one line that says what, what is known, and where."""

import re
from pathlib import Path
from typing import Any

import pytest

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.clipping import CLIPS
from models.guards import GUARDS
from models.norms import NORMS
from models.optimizers import OPTIMIZERS
from models.resets import RESETS
from models.transformer import ModelConfig, Transformer
from models.variants import options_of
from study.config import ConfigError, StudyConfig, TrialConfig, load_study, presets, trial_config
from study.schedules import SCHEDULES
from study.space import plan_trials

TABLES = {
    "model.norm": NORMS, "model.block": BLOCKS, "model.relaxation": RELAXATIONS, "clip": CLIPS,
    "guard": GUARDS, "optimizer": OPTIMIZERS, "reset": RESETS, "schedule": SCHEDULES,
}  # fmt: skip
VARIANTS = [(key, name) for key, table in TABLES.items() for name in table]


def refusal(*overrides: str, study: str = "figure") -> str:
    """The one line with which a study is refused."""
    with pytest.raises(ConfigError) as caught:
        plan_trials(load_study(study, overrides), study)
    message = str(caught.value)
    assert "\n" not in message
    return message


BAD_STUDIES = [
    ("trial.stpes=3", "unknown key 'stpes', did you mean 'steps'?; known: accumulate, batch_size, "),
    ("trial.record.activation=true", "unknown key 'activation', did you mean 'activations'?; known: "),
    ("trial.model.num_layer=2", "unknown key 'num_layer', did you mean 'num_layers'?; known: "),
    ("serach.seeds=2", "unknown key 'serach', did you mean 'search'?; known: arms, "),
    ("search.seed=2", "unknown key 'seed', did you mean 'seeds'?; known: algorithm, "),
    ("steps=2", "unknown key 'steps'; known: arms, checkpoint_seconds, "),
    ("trial.model.norm=lyer", "unknown norm 'lyer', did you mean 'layer'?; known: "),
    ("trial.clip=globalnorm", "unknown clip 'globalnorm', did you mean 'global_norm'?; known: "),
    ("trial.schedule=cosin", "unknown schedule 'cosin', did you mean 'cosine'?; known: constant, "),
    ("trial.data=stdlob", "unknown data 'stdlob', did you mean 'stdlib'?; known: "),
    ("trial.optimizer.momentum=0.9", "unknown option of optimizer 'adamw' 'momentum'; known: amsgrad, "),
    ("trial.clip={name: none, max_norm: 3}", "unknown option of clip 'none' 'max_norm'; known: none"),
    ("trial.model.norm={name: layer, epz: 1}", "unknown option of norm 'layer' 'epz', did you mean 'eps'?"),
    ("trial.data={name: tokens}", "data 'tokens' needs its option 'path'"),
    ("trial.steps=-5", "input should be greater than 0, got -5"),
    ("trial.steps=0", "input should be greater than 0, got 0"),
    ("trial.steps=2.5", "got 2.5"),
    ("trial.steps=many", "got 'many'"),
    ("trial.seed=-1", "input should be greater than or equal to 0, got -1"),
    ("trial.schedule.warmup_steps=-3", "warmup_steps must not be negative, got -3"),
    ("trial.optimizer.lr=-1", "lr must be at least 0, got -1.0"),
    ("trial.optimizer.lr=.nan", "lr must be a finite number, got nan"),
    ("trial.optimizer.lr=fast", "optimizer lr: input should be a valid number"),
    ("trial.optimizer.betas=0.9", "optimizer betas: "),
    ("trial.precision=fp8", "input should be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
    ("trial.validation.fraction=1.5", "input should be less than 1, got 1.5"),
    ("trial.model.num_heads=5", "d_model 48 does not divide into num_heads 5"),
    ("trial.model.scores=float8", "unknown score type 'float8', did you mean"),
    ("trial.model.vocab_size=5", "vocab_size comes from the data; leave it out"),
    ("trial.accumulate=3", "accumulate 3 must divide batch_size 8"),
    ("trial.model=null", "got None"),
    ("trial.model=deepnorm", "got 'deepnorm'"),
    ("trial.clip=5", "clip must be a name or {name: ..., option: value}, got 5"),
    ("trial.record=5", "got 5"),
    ("trial=[]", "input should be a valid dictionary, got []"),
    ("search.seeds=0", "input should be greater than 0, got 0"),
    ("search.algorithm=grdi", "input should be 'grid'"),
    ("resources=all", "got 'all'"),
    ("arms=3", "input should be a valid list, got 3"),
    ("trial.steps", "override 'trial.steps' must look like trial.steps=60 (--set)"),
    ("=60", "override '=60' must look like trial.steps=60 (--set)"),
    ("trial.steps={", "value '{' isn't YAML: while parsing"),
]


@pytest.mark.parametrize(("override", "says"), BAD_STUDIES, ids=[override for override, _ in BAD_STUDIES])
def test_a_bad_setting_is_refused_with_what_was_given_and_what_is_known(override: str, says: str) -> None:
    assert says in refusal(override)


@pytest.mark.parametrize("override", [override for override, _ in BAD_STUDIES if "=" in override[1:]])
def test_a_refusal_ends_with_its_place(override: str) -> None:
    key = override.partition("=")[0].split(".")[-1]
    if "isn't YAML" not in refusal(override):
        assert re.search(r"\(.*(figure).*\)$", refusal(override)), key


@pytest.mark.parametrize(("key", "name"), VARIANTS)
def test_every_variant_is_complete_with_its_defaults_and_refuses_a_strange_option(
    key: str, name: str
) -> None:
    needs = (
        {"model": {"norm": "none"}} if key == "model.block" and BLOCKS[name].refuses(ModelConfig()) else {}
    )
    config = trial_config(needs, {key: name})
    section = config.model_dump()
    for part in key.split("."):
        section = section[part]
    options = options_of(TABLES[key][name])
    assert section == {"name": name} | {
        option: list(p.default) if isinstance(p.default, tuple) else p.default
        for option, p in options.items()
    }
    assert trial_config(needs, {key: {"name": name}}) == config
    with pytest.raises(ConfigError, match=f"unknown option of {key.rpartition('.')[2]} '{name}' 'zzz'"):
        trial_config({}, {key: {"name": name, "zzz": 1}})


def test_what_was_resolved_resolves_to_itself() -> None:
    for plan in plan_trials(load_study("figure")):
        assert TrialConfig.model_validate(plan.config.model_dump()) == plan.config


def test_any_key_is_reached_by_set() -> None:
    overrides = [
        "trial.steps=60", "trial.optimizer.lr=1e-2", "trial.optimizer.betas=[0.8, 0.9]",
        "trial.model.relaxation.alpha=8", "trial.record.grad_norms=true", "trial.validation.period=5",
        "search.seeds=2", "resources={cpu: 2}", "max_failures=0", "name=other", "arms=[{clip: none}]",
        "trial.model.relaxation.name=pb_relax", "space={batch_size: [2, 4]}", "flush_seconds=0.5",
        "trial.mask_fraction=.5", "trial.model.causal=false",
    ]  # fmt: skip
    study = load_study("figure", overrides)
    plans = plan_trials(study)
    first = plans[0].config
    assert (study.name, study.max_failures, study.resources) == ("other", 0, {"cpu": 2})
    assert study.flush_seconds == 0.5
    assert len(plans) == 4 and [plan.config.batch_size for plan in plans] == [2, 4, 2, 4]
    assert (first.steps, first.seed, first.mask_fraction) == (60, 0, 0.5)
    assert (first.optimizer["lr"], first.optimizer["betas"]) == (0.01, [0.8, 0.9])
    assert first.model.relaxation == {"name": "pb_relax", "alpha": 8.0, "form": "pre_matmul"}
    assert first.record.grad_norms and first.validation.period == 5 and not first.model.causal
    assert first.clip == {"name": "none"}


@pytest.mark.parametrize("text", ["1e-2", "1E-2", "0.01", "1.0e-2", "+1e-2", "10e-3"])
def test_a_power_of_ten_is_a_number(text: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(f"trial: {{optimizer: {{lr: {text}}}}}\n")
    lr = load_study(str(file)).trial["optimizer"]["lr"]
    assert isinstance(lr, float) and lr == 0.01
    assert load_study("figure", [f"trial.optimizer.lr={text}"]).trial["optimizer"]["lr"] == 0.01


def test_set_comes_after_the_file_and_the_last_set_wins() -> None:
    assert load_study("figure").trial["steps"] == 1200
    assert load_study("figure", ["trial.steps=60", "trial.steps=70"]).trial["steps"] == 70


def test_an_arm_changes_an_option_or_replaces_the_variant_with_its_options() -> None:
    base = {"clip": {"name": "global_norm", "max_norm": 3.0}, "optimizer": {"lr": 0.5, "eps": 1e-3}}
    assert trial_config(base, {"clip.max_norm": 10}).clip == {"name": "global_norm", "max_norm": 10.0}
    assert trial_config(base, {"clip": "none"}).clip == {"name": "none"}
    assert trial_config(base, {"clip": "global_norm"}).clip["max_norm"] == 1.0
    assert trial_config(base, {"optimizer": {"name": "sgd", "lr": 1}}).optimizer["momentum"] == 0.0
    assert trial_config(base, {"optimizer.lr": 2}).optimizer["eps"] == 1e-3
    assert trial_config({"clip": "global_norm"}, {"clip.max_norm": 7}).clip["max_norm"] == 7.0
    assert trial_config({}, {"clip.max_norm": 7}).clip["max_norm"] == 7.0
    assert base["clip"]["max_norm"] == 3.0  # an arm never leaks into the next one
    for name in CLIPS:
        assert trial_config(base, {"clip": name}).clip["name"] == name


def test_a_path_of_data_picks_the_corpus_that_reads_it() -> None:
    assert trial_config({}, {"data.path": "a.txt"}).data["name"] == "text"
    assert trial_config({"data": {"name": "stdlib"}}, {"data.path": "a.bin"}).data["name"] == "tokens"
    assert trial_config({"data": "stdlib"}, {}).data == {"name": "stdlib"}
    assert trial_config({}, {"data": {"name": "text", "path": "a.bin"}}).data["name"] == "text"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"trial: {steps: 3", "can't be read: while parsing"),
        (b"- trial", "must hold a mapping of sections, got list"),
        (b"", "must hold a mapping of sections, got NoneType"),
        (b"\xff\xfe", "can't be read: 'utf-8' codec"),
        (b"trial: !!python/object/apply:os.system [ls]", "can't be read: could not determine a constructor"),
        (b"trails: {}", "unknown key 'trails', did you mean 'trial'?"),
        (b"trial: {5: 3}", "got 5"),
    ],
)
def test_a_file_that_is_no_study_is_named_with_the_reason(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_bytes(content)
    message = refusal(study=str(file))
    assert says in message and str(file) in message


def test_a_study_that_is_missing_is_told_apart_from_a_preset_that_is_misspelt(tmp_path: Path) -> None:
    assert f"no study file '{tmp_path}/x.yaml'; presets: " in refusal(study=f"{tmp_path}/x.yaml")
    assert f"no study file '{tmp_path}'" in refusal(study=str(tmp_path))
    assert "unknown preset 'figrue', did you mean 'figure'?; known: " in refusal(study="figrue")


def test_a_study_without_a_word_is_one_trial_of_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my_study.yaml"
    file.write_text("trial: {}\n")
    study = load_study(str(file))
    assert study.name == "my_study"
    (plan,) = plan_trials(study)
    assert plan.config == TrialConfig() and plan.arm == "my_study" and plan.overrides == {}
    assert plan.config == trial_config({"model": {}, "record": {}, "clip": {}}, {})
    assert plan.config.model.block["name"] == "pre" and plan.config.model.norm["eps"] == 1e-5


def sections_of(yaml_text: str) -> list[str]:
    return re.findall(r"^(\w+):", yaml_text, re.MULTILINE)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_parses_expands_and_builds(preset: str) -> None:
    import torch

    from study.config import PRESETS

    text = (PRESETS / f"{preset}.yaml").read_text()
    header = [line.split(":")[0] for line in text.splitlines()[:5]]
    assert header == ["# Question", "# Run", "# Cost", "# Expect", "# Source"]
    order = ["trial", "arms", "space", "search", "resources", "claims"]
    assert [section for section in sections_of(text) if section in order] == [
        section for section in order if section in sections_of(text)
    ]
    plans = plan_trials(load_study(preset))
    assert plans and len({plan.arm for plan in plans}) == 1 + max(plan.arm_number for plan in plans)
    with torch.device("meta"):
        for plan in plans:
            Transformer(plan.config.model)


def test_the_figure_has_the_four_lines_of_the_figure() -> None:
    plans = plan_trials(load_study("figure"))
    assert [plan.arm for plan in plans] == [
        "Pre-Norm | Gradient Clip=10 | Run 1",
        "Pre-Norm | Gradient Clip=1 | Run 2",
        "Post-Norm | DeepNorm | Gradient Clip=1",
        "Pre-Norm | Attn. Relax | Gradient Clip=1",
    ]
    assert [plan.config.clip["max_norm"] for plan in plans] == [10.0, 1.0, 1.0, 1.0]
    assert [plan.config.model.block["name"] for plan in plans] == ["pre", "pre", "deepnorm", "pre"]
    relaxations = [plan.config.model.relaxation["name"] for plan in plans]
    assert relaxations == ["none", "none", "none", "pb_relax"]


def test_a_section_is_frozen() -> None:
    config: Any = TrialConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 5
    with pytest.raises(AttributeError):
        config.model.d_model = 5
    assert isinstance(StudyConfig(name="x").search.seeds, int)


def test_a_setting_without_effect_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mask_fraction has no effect"):
        trial_config({"mask_fraction": 0.2}, {})
    assert trial_config({"mask_fraction": 0.2, "model": {"causal": False}}, {}).mask_fraction == 0.2

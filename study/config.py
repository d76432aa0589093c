"""Study files: load, override, reject. What comes out is complete and known to be buildable.

A study is one flat YAML file (see study/presets/): `trial` holds fixed settings, `arms` or `space`
what differs. Precedence: defaults < study file < `--profile NAME` < `--set a.b=c`. Every mistake is one
ConfigError in the form given; known (where).
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from models.imports import is_import
from models.transformer import ModelConfig
from models.variants import normalize, unknown
from study.imported import ImportedSection, check_combination, kind_of_model
from study.ranks import refusal
from study.specs import (
    BlockSpec,
    ClipSpec,
    DataSpec,
    GuardSpec,
    LoggerSpec,
    LossSpec,
    NormSpec,
    OptimizerSpec,
    RelaxationSpec,
    ResetSpec,
    ScheduleSpec,
)
from study.validation import TAGS, ConfigError, validate

PRESETS = Path(__file__).parent / "presets"


class Section(BaseModel):
    """A part of a study file: unknown keys are errors, not silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


@dataclass(frozen=True)
class ModelSection(ModelConfig):
    """The transformer, as models.transformer.ModelConfig has it; its vocabulary comes from the data."""

    __pydantic_config__ = ConfigDict(extra="forbid", validate_default=True)

    norm: NormSpec = "layer"  # type: ignore[assignment]
    block: BlockSpec = "pre"  # type: ignore[assignment]
    relaxation: RelaxationSpec = "none"  # type: ignore[assignment]


# Validated, so that its variants have all their options filled in; an instance as a default is not.
DEFAULT_MODEL = TypeAdapter(ModelSection).validate_python({})
ModelChoice = Annotated[
    Annotated[ModelSection, Tag(TAGS[0])] | Annotated[ImportedSection, Tag(TAGS[1])],
    Discriminator(kind_of_model),
]


class RecordSection(Section):
    """What is recorded beside the core columns, and how often."""

    period: int = Field(10, gt=0)  # steps between two samples of the optional groups
    grad_norms: bool = False  # grad_norm/<group>
    update_ratios: bool = False  # update_ratio/<group>
    activations: bool = False  # attn_logit_max and act_rms/<block>
    model_update: bool = False  # and output_logit_max, log_z: the logits of the first batch, after the step


class ValidationSection(Section):
    """Loss on held-out text."""

    fraction: float = Field(0.05, ge=0, lt=1)  # of the corpus, from its end; held out in any case
    period: int = Field(0, ge=0)  # steps between two measurements; 0: never
    batches: int = Field(8, gt=0)


class TrialConfig(Section):
    """One training, complete."""

    model: ModelChoice = DEFAULT_MODEL
    loss: LossSpec | None = None  # None: mean cross entropy
    clip: ClipSpec = {"name": "global_norm"}
    guard: GuardSpec = {"name": "skip_nonfinite"}
    optimizer: OptimizerSpec = {"name": "adamw"}
    reset: ResetSpec = {"name": "none"}
    schedule: ScheduleSpec = {"name": "constant"}
    data: DataSpec = {"name": "stdlib"}
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    batch_size: int = Field(8, gt=0)  # sequences a step
    accumulate: int = Field(1, gt=0)  # micro-batches that a step's batch is cut into
    mask_fraction: float = Field(0.15, gt=0, lt=1)  # of the positions, where the model isn't causal
    steps: int = Field(1200, gt=0)
    seed: int = Field(0, ge=0)
    patience: int = Field(10, gt=0)  # non-finite steps in a row that end a trial as diverged
    compile: bool = False
    workers: int = Field(1, gt=0)  # processes that share each batch, one GPU (or core) each
    parallel: Literal["ddp", "fsdp2"] = "ddp"  # how they share the model, where there are several
    record: RecordSection = RecordSection()
    validation: ValidationSection = ValidationSection()


class SearchSection(Section):
    """How the space is walked; the words are Ray's and Optuna's own."""

    algorithm: Literal["grid", "random", "optuna"] = "grid"
    sampler: Literal["tpe", "gp", "nsga2", "cmaes", "qmc"] | None = None  # of optuna; tpe
    num_samples: int | None = Field(None, gt=0)  # points of the space, for every arm; a grid takes all
    sampler_seed: int = Field(0, ge=0)  # of the points that are drawn
    seeds: int = Field(1, gt=0)  # every point is run this often, from trial.seed on
    metric: str | None = None  # what is sought: a name of METRICS, or lr_sensitivity; final_loss
    mode: Literal["min", "max"] | None = None  # which way is calmer, as METRICS has it
    metrics: list[str] | None = Field(None, min_length=2, max_length=2)  # two at once: a Pareto front
    modes: list[Literal["min", "max"]] | None = Field(None, min_length=2, max_length=2)
    lr_sweep: list[float] | None = Field(None, min_length=2)  # learning rates of every point; lr_sensitivity
    points_to_evaluate: list[dict[str, Any]] = []  # points, or parts of points, that come first
    scheduler: Literal["none", "asha", "median"] = "none"  # stops trials early; hides late divergence
    time_budget: float | None = Field(None, gt=0)  # seconds after which no trial is begun
    max_concurrent: int | None = Field(None, gt=0)


class StudyConfig(Section):
    """A question and the trials that are to answer it."""

    name: str
    trial: dict[str, Any] = {}
    arms: list[dict[str, Any]] = []
    space: dict[str, Any] = {}
    search: SearchSection = SearchSection()
    resources: Literal["auto"] | dict[str, float] = "auto"
    claims: list[dict[str, Any]] = []
    loggers: list[LoggerSpec] = []  # where rows go beside the trace: names of LOGGERS
    profiles: dict[str, dict[str, Any]] = {}  # name -> dotted key -> value, for `--profile`
    max_failures: int = Field(3, ge=0)  # restarts of a trial that dies
    flush_seconds: float = Field(2.0, gt=0)
    checkpoint_seconds: float = Field(60.0, ge=0)


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_value(text: str) -> Any:
    """The value in `--set key=value`, read as YAML."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"value '{text}' isn't YAML: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def presets() -> list[str]:
    """Names of the studies that ship."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def study_path(name: str) -> Path:
    """The file of a preset, or the file that `name` is the path of."""
    return PRESETS / f"{name}.yaml" if name in presets() else Path(name)


def study_source(name: str) -> str:
    """How messages call a study's file."""
    path = study_path(name)
    return f"study/presets/{path.name}" if path.parent == PRESETS else str(path)


def load_study(name: str, overrides: Sequence[str] = (), profile: str | None = None) -> StudyConfig:
    """The study of a preset or file, with one of its own profiles and then `a.b=c` overrides applied.

    Raises ConfigError for anything that can't be a study.
    """
    path, where = study_path(name), study_source(name)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml") or "/" in name:
            raise ConfigError(f"no study file '{name}'; presets: {', '.join(presets())}")
        raise ConfigError(str(unknown("preset", name, presets())))
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"study file '{name}' can't be read: {_one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"study file '{name}' must hold a mapping of sections, got {type(raw).__name__}")
    raw.setdefault("name", path.stem)
    if profile is not None:
        _apply_profile(raw, profile, where)
        where = f"{where} or --profile"
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override '{override}' must look like trial.steps=60 (--set)")
        set_dotted(raw, key.strip(), parse_value(value))
        where = f"{where} or --set"
    return validate(StudyConfig, raw, where)


def _apply_profile(raw: dict[str, Any], profile: str, where: str) -> None:
    known = validate(
        StudyConfig, {"name": raw["name"], "profiles": raw.get("profiles") or {}}, where
    ).profiles
    if profile not in known:
        raise ConfigError(str(unknown("profile", profile, known, f"{where}: profiles")))
    for key, value in known[profile].items():
        set_dotted(raw, key, copy.deepcopy(value))


def set_dotted(target: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` in nested mappings; a variant's bare name on the way becomes {name: ...}."""
    *path, last = key.split(".")
    for part in path:
        inner = target.get(part, {})
        target[part] = normalize(inner) if isinstance(inner, str | Mapping) else {}
        target = target[part]
    target[last] = value


def trial_config(trial: Mapping[str, Any], overrides: Mapping[str, Any], where: str = "") -> TrialConfig:
    """A trial's settings with an arm's dotted overrides on top, checked to be buildable.

    Raises ConfigError.
    """
    raw = copy.deepcopy(dict(trial))
    for key, value in overrides.items():
        set_dotted(raw, key, copy.deepcopy(value))
    if isinstance(raw.get("model"), Mapping) and "vocab_size" in raw["model"]:
        raise ConfigError(f"vocab_size comes from the data; leave it out ({where})")
    data = raw.get("data")
    if is_import(data):
        pass
    elif isinstance(data, dict) and "path" in data and data.get("name", "stdlib") == "stdlib":
        data["name"] = "tokens" if str(data["path"]).endswith(".bin") else "text"
    elif isinstance(data, dict):
        data.setdefault("name", "stdlib")
    _fill_names(raw)
    config = validate(TrialConfig, raw, where)
    try:
        check_combination(config)
    except ValueError as error:
        raise ConfigError(f"{error} ({where})") from error
    if "mask_fraction" in raw and config.model.causal:
        raise ConfigError(
            f"mask_fraction has no effect on a causal model; known with causal: false ({where})"
        )
    if "parallel" in raw and config.workers == 1:
        raise ConfigError(f"parallel has no effect on one worker; known with workers: 2 or more ({where})")
    if reason := refusal(config):
        raise ConfigError(f"{reason} ({where})")
    return config


def _fill_names(raw: dict[str, Any]) -> None:
    """`clip: {max_norm: 10}` means the default clip with this option."""
    defaults = TrialConfig.model_fields
    for key in ("clip", "optimizer", "schedule", "guard", "reset"):
        if isinstance(raw.get(key), dict) and not is_import(raw[key]):
            raw[key].setdefault("name", normalize(defaults[key].default)["name"])
    section = {} if is_import(raw.get("model")) else raw.get("model")
    for field in fields(ModelSection):
        if isinstance(section, dict) and isinstance(section.get(field.name), dict):
            section[field.name].setdefault("name", field.default)

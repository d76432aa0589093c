"""Study files: load, override, reject. What comes out is complete and known to be buildable.

A study is one flat YAML file (see study/presets/): `trial` holds fixed settings, `arms` or `space`
what differs. Precedence: defaults < study file < `--profile NAME` < `--set a.b=c`. Every mistake is one
ConfigError in the form given; known (where).
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from torch import nn

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.clipping import CLIPS
from models.guards import GUARDS
from models.norms import NORMS
from models.optimizers import OPTIMIZERS
from models.resets import RESETS
from models.transformer import ModelConfig
from models.variants import VariantError, build, check, normalize, options_of, unknown
from study.data import CORPORA
from study.schedules import SCHEDULES

PRESETS = Path(__file__).parent / "presets"


class ConfigError(ValueError):
    """A study that can't be run as it is written; one clear line."""


def _variant(kind: str, table: Mapping[str, type], *context: Any, built: bool = False) -> BeforeValidator:
    """For a field that holds a word of `table`: its options checked, all defaults filled in.

    `built`: the variant is constructed once, from `context`, so that it judges its options' values;
    those of the model are judged by ModelConfig.
    """

    def complete(spec: Any) -> dict[str, Any]:
        if not isinstance(spec, str | Mapping):
            raise VariantError(f"{kind} must be a name or {{name: ..., option: value}}, got {spec!r}")
        chosen = check(kind, table, spec)
        variant = table[chosen.pop("name")]
        resolved: dict[str, Any] = {"name": normalize(spec)["name"]}
        for option, parameter in options_of(variant).items():
            if option in chosen:
                resolved[option] = _typed(chosen[option], parameter.annotation, f"{kind} {option}")
            elif parameter.default is parameter.empty:
                raise VariantError(f"{kind} '{resolved['name']}' needs its option '{option}'")
            else:
                resolved[option] = _plain(parameter.default)
        if built:
            build(kind, table, resolved, *context)
        return resolved

    return BeforeValidator(complete)


def _typed(value: Any, hint: Any, what: str) -> Any:
    try:
        return _plain(TypeAdapter(hint).validate_python(value))
    except ValidationError as error:
        raise VariantError(f"{what}: {error.errors()[0]['msg'].lower()}, got {value!r}") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# An optimizer wants parameters to judge its options by.
_EXAMPLE = [("weight", nn.Parameter(torch.zeros(2, 2)))]

NormSpec = Annotated[dict[str, Any], _variant("norm", NORMS)]
BlockSpec = Annotated[dict[str, Any], _variant("block", BLOCKS)]
RelaxationSpec = Annotated[dict[str, Any], _variant("relaxation", RELAXATIONS)]
ClipSpec = Annotated[dict[str, Any], _variant("clip", CLIPS, built=True)]
GuardSpec = Annotated[dict[str, Any], _variant("guard", GUARDS, built=True)]
OptimizerSpec = Annotated[dict[str, Any], _variant("optimizer", OPTIMIZERS, _EXAMPLE, built=True)]
ResetSpec = Annotated[dict[str, Any], _variant("reset", RESETS, built=True)]
ScheduleSpec = Annotated[dict[str, Any], _variant("schedule", SCHEDULES, built=True)]
DataSpec = Annotated[dict[str, Any], _variant("data", CORPORA, built=True)]


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

    model: ModelSection = DEFAULT_MODEL
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
    record: RecordSection = RecordSection()
    validation: ValidationSection = ValidationSection()


class SearchSection(Section):
    """How the space is walked; the words are Ray's and Optuna's own."""

    algorithm: Literal["grid", "random", "optuna"] = "grid"
    sampler: Literal["tpe", "gp", "nsga2", "cmaes", "qmc"] | None = None  # of optuna; tpe
    num_samples: int | None = Field(None, gt=0)  # points of the space, for every arm; a grid takes all
    seed: int = Field(0, ge=0)  # of the drawing of points
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
    if isinstance(data, dict) and "path" in data and data.get("name", "stdlib") == "stdlib":
        data["name"] = "tokens" if str(data["path"]).endswith(".bin") else "text"
    elif isinstance(data, dict):
        data.setdefault("name", "stdlib")
    _fill_names(raw)
    config = validate(TrialConfig, raw, where)
    if config.accumulate > config.batch_size or config.batch_size % config.accumulate:
        raise ConfigError(
            f"accumulate {config.accumulate} must divide batch_size {config.batch_size} ({where})"
        )
    return config


def _fill_names(raw: dict[str, Any]) -> None:
    """`clip: {max_norm: 10}` means the default clip with this option."""
    defaults = TrialConfig.model_fields
    for key in ("clip", "optimizer", "schedule", "guard", "reset"):
        if isinstance(raw.get(key), dict):
            raw[key].setdefault("name", normalize(defaults[key].default)["name"])
    section = raw.get("model")
    for field in fields(ModelSection):
        if isinstance(section, dict) and isinstance(section.get(field.name), dict):
            section[field.name].setdefault("name", field.default)


def validate(section: type[BaseModel], raw: Mapping[str, Any], where: str) -> Any:
    """`section` made from `raw`, or a ConfigError about the first thing that is wrong."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(section, error, where)) from None


def _explain(section: type[BaseModel], error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    place = ".".join(location)
    if where:
        place = f"{where}.{place}" if where.endswith(": trial") else f"{where}: {place}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(section, location[:-1])
        return str(unknown("key", location[-1], known, place))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{message} ({place})"
    if first["type"] == "missing":
        return f"a value is needed ({place})"
    return f"{message[0].lower()}{message[1:]}, got {first['input']!r} ({place})"


def _known_keys(section: Any, path: Iterable[str]) -> list[str]:
    for part in path:
        section = section.model_fields[part].annotation
    if is_dataclass(section):
        return [field.name for field in fields(section) if field.name != "vocab_size"]
    return list(getattr(section, "model_fields", []))

"""Field types of a study file that hold a variant: `name` or `{name, options}`, made complete.

From a table alone follows what its field accepts: its words, their options, the options' types and
defaults. A resolved field is `{name, all options}`, so that a record of it says everything.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from torch import nn

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.clipping import CLIPS
from models.guards import GUARDS
from models.imports import complete, is_import
from models.norms import NORMS
from models.optimizers import OPTIMIZERS
from models.resets import RESETS
from models.variants import VariantError, build, check, normalize, options_of
from study.data import CORPORA
from study.loggers import LOGGERS
from study.schedules import SCHEDULES


def _variant(
    kind: str, table: Mapping[str, type], *context: Any, built: bool = False, imports: bool = False
) -> BeforeValidator:
    """For a field that holds a word of `table`: its options checked, all defaults filled in.

    `built`: the variant is constructed once, from `context`, so that it judges its options' values;
    those of the model are judged by ModelConfig. `imports`: the field may hold {import: ...} instead.
    """

    def resolve(spec: Any) -> dict[str, Any]:
        if is_import(spec):
            if not imports:
                raise VariantError(f"{kind} can't be imported; known: {', '.join(sorted(table))}")
            return complete(kind, spec)
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

    return BeforeValidator(resolve)


def _typed(value: Any, hint: Any, what: str) -> Any:
    try:
        return _plain(TypeAdapter(hint).validate_python(value))
    except ValidationError as error:
        raise VariantError(f"{what}: {error.errors()[0]['msg'].lower()}, got {value!r}") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _loss(spec: Any) -> dict[str, Any]:
    if not is_import(spec):
        raise VariantError(f"loss {spec!r}; must be {{import: module:name, option: value}}, or left out")
    return complete("loss", spec)


# An optimizer wants parameters to judge its options by.
_EXAMPLE = [("weight", nn.Parameter(torch.zeros(2, 2)))]

NormSpec = Annotated[dict[str, Any], _variant("norm", NORMS)]
BlockSpec = Annotated[dict[str, Any], _variant("block", BLOCKS)]
RelaxationSpec = Annotated[dict[str, Any], _variant("relaxation", RELAXATIONS)]
ClipSpec = Annotated[dict[str, Any], _variant("clip", CLIPS, built=True)]
GuardSpec = Annotated[dict[str, Any], _variant("guard", GUARDS, built=True)]
OptimizerSpec = Annotated[
    dict[str, Any], _variant("optimizer", OPTIMIZERS, _EXAMPLE, built=True, imports=True)
]
ResetSpec = Annotated[dict[str, Any], _variant("reset", RESETS, built=True)]
ScheduleSpec = Annotated[dict[str, Any], _variant("schedule", SCHEDULES, built=True)]
DataSpec = Annotated[dict[str, Any], _variant("data", CORPORA, built=True, imports=True)]
LossSpec = Annotated[dict[str, Any], BeforeValidator(_loss)]
LoggerSpec = Annotated[dict[str, Any], _variant("logger", LOGGERS, built=True)]

"""A trial's model and loss: our own, or what a study imports.

`trial.model` is either our Transformer's settings or an ImportedSection; build_model makes either.
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from models.imported import ImportedModel, Model
from models.imports import bound, call, complete, is_import, names_parameter
from models.losses import Criterion, cross_entropy
from models.transformer import ModelConfig, Transformer
from models.variants import VariantError
from study.validation import TAGS

if TYPE_CHECKING:
    from study.config import TrialConfig

OWN_KEYS = {"context_length", "causal"}  # of the section, whatever the model
# Options of ours that say how a model is built inside; `**options` of an import would swallow them.
OURS = (
    {field.name for field in fields(ModelConfig)} - OWN_KEYS - {"d_model", "num_layers", "num_heads", "d_ff"}
)


class ImportedSection(BaseModel):
    """`trial.model: {import: module:name, context_length: 48, causal: true, **options}`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    path: str = Field(alias="import")
    context_length: int = Field(48, gt=0)  # the longest sequence, in tokens; handed to the callable
    causal: bool = True  # next-token prediction, else masked prediction

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        if not is_import(raw):
            return raw
        own = {key: value for key, value in raw.items() if key in OWN_KEYS}
        spec = {key: value for key, value in raw.items() if key not in OWN_KEYS}
        resolved = complete("model", spec)
        for key in spec:
            if key in OURS and not names_parameter("model", spec["import"], key):
                raise VariantError(
                    f"{key} has no effect on the imported model '{spec['import']}', which doesn't name it; "
                    f"known without import"
                )
        return {**own, **resolved}

    @property
    def spec(self) -> dict[str, Any]:
        """What models.imports calls: the path and the options alone."""
        return {"import": self.path, **(self.model_extra or {})}

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        own = {"context_length": self.context_length, "causal": self.causal}
        return {"import": self.path, **own, **(self.model_extra or {})}


def kind_of_model(value: Any) -> str:
    """Which of the two sections a value is meant for."""
    return TAGS[is_import(value) or isinstance(value, ImportedSection)]


def check_combination(config: "TrialConfig") -> None:
    """ValueError for what would silently be left out."""
    z_loss = 0.0 if isinstance(config.model, ImportedSection) else config.model.z_loss
    if config.loss is not None and z_loss:
        raise ValueError(
            f"z_loss {z_loss} is no part of the imported loss '{config.loss['import']}'; "
            "known: one or the other, model.z_loss with our own loss"
        )


def build_model(config: "TrialConfig", vocab_size: int) -> Model:
    """The trial's model with its loss, on the current device and from torch's random state.

    vocab_size: of the data; masked prediction adds a token behind which positions are hidden.
    """
    num_tokens = vocab_size + (0 if config.model.causal else 1)
    criterion: Criterion = cross_entropy
    if config.loss is not None:
        criterion = bound("loss", config.loss)
    section = config.model
    if not isinstance(section, ImportedSection):
        return Transformer(replace(section, vocab_size=num_tokens), criterion)
    made = call(
        "model",
        section.spec,
        vocab_size=num_tokens,
        context_length=section.context_length,
        causal=section.causal,
    )
    return ImportedModel(made, num_tokens, criterion)

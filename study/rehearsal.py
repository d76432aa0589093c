"""A trial's parts, made once without memory or data, so that what can't be made is known before the run.

Our own model is made of nothing but shapes. So is an imported one where that can be done; else, and
where its forward pass needs numbers, it is made in earnest if it is small. An imported optimizer and
loss meet the shapes that they will meet.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.imported import ImportedModel, Model, OutputError
from models.imports import is_import
from models.losses import IGNORED_TARGET
from models.optimizers import build_optimizer
from models.variants import VariantError, one_line
from study.imported import build_model

if TYPE_CHECKING:
    from study.config import TrialConfig

SMALL = 20_000_000  # parameters of a model that is made in earnest to see its forward pass


@dataclass(frozen=True)
class Rehearsal:
    """What came of it."""

    num_parameters: int  # trainable, tied weights once
    num_frozen: int
    has_blocks: bool  # whether what comes out of each block can be observed


_done: dict[str, Rehearsal] = {}


def rehearse(config: "TrialConfig", vocab_size: int) -> Rehearsal:
    """Make the model, and the loss and optimizer that are imported; VariantError for what can't be.

    Remembered, since many trials share them.
    """
    imported = [part for part in (config.loss, config.optimizer) if is_import(part)]
    key = repr((config.model, imported, vocab_size))
    if key not in _done:
        with torch.random.fork_rng(devices=[]):
            model = _model(config, vocab_size)
            if config.loss is not None:
                _try_loss(config.loss["import"], model, vocab_size)
            if is_import(config.optimizer):
                _try_optimizer(config, model)
        sizes = {True: 0, False: 0}
        for parameter in model.parameters():
            sizes[parameter.requires_grad] += parameter.numel()
        has_blocks = not isinstance(model, ImportedModel) or model.blocks_path is not None
        _done[key] = Rehearsal(sizes[True], sizes[False], has_blocks)
    return _done[key]


def _model(config: "TrialConfig", vocab_size: int) -> Model:
    try:
        with torch.device("meta"):
            model = build_model(config, vocab_size)
    except VariantError:
        model = build_model(config, vocab_size)  # it looks at its numbers, or there is something wrong
    if not isinstance(model, ImportedModel):
        return model
    name = getattr(config.model, "path", "")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise VariantError(f"model '{name}' has no parameter to train")
    error = _try_forward(model, config.model.context_length)
    if error is not None and not isinstance(error, OutputError):
        if sum(parameter.numel() for parameter in model.parameters()) > SMALL:
            return model  # whether it works with numbers shows at its first step
        earnest = build_model(config, vocab_size)
        assert isinstance(earnest, ImportedModel)
        error = _try_forward(earnest, config.model.context_length)
    if error is not None:
        raise VariantError(f"model '{name}' fails on a batch: {one_line(error)}")
    return model


def _try_forward(model: ImportedModel, context_length: int) -> Exception | None:
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model(torch.zeros(1, context_length, dtype=torch.int64, device=device))
    except Exception as error:  # theirs may raise anything
        return error
    return None


def _try_loss(name: str, model: Model, vocab_size: int) -> None:
    logits_BxTxV = torch.zeros(2, 3, vocab_size, requires_grad=True)
    targets_BxT = torch.tensor([[0, IGNORED_TARGET, 0]] * 2)
    try:
        value = model.criterion(logits_BxTxV, targets_BxT)
    except Exception as error:  # theirs may raise anything
        raise VariantError(f"loss '{name}' fails on a batch: {one_line(error)}") from error
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise VariantError(
            f"loss '{name}' gave {type(value).__name__}{shape}; must be a 0-dim tensor with a gradient"
        )


def _try_optimizer(config: "TrialConfig", model: Model) -> None:
    """Parameters of the right names and shapes, all of whose numbers are one zero."""
    named = [
        (name, nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    build_optimizer(config.optimizer, named)

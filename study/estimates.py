"""What a trial will need, before it is run: parameters, memory, and what will change nothing."""

from dataclasses import dataclass, replace

import torch

from models.transformer import ModelConfig, Transformer, no_op_reasons
from study.config import ConfigError, TrialConfig
from study.data import Batches, DataError, Tokens

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Estimate:
    """Of one trial; memory in bytes."""

    num_parameters: int
    memory: int
    notes: list[str]


def estimate(config: TrialConfig, data: Tokens, where: str = "") -> Estimate:
    """What a trial needs. Builds its model without memory, so that what can't be built is known now.

    Memory is weights, gradients and two moments in float32, and the activations that a backward pass
    keeps: a guide for choosing batch sizes, not a bound. Raises ConfigError.
    """
    model = replace(config.model, vocab_size=data.vocab_size + (0 if config.model.causal else 1))
    try:
        held_out = int(len(data.tokens) * config.validation.fraction)
        Batches(data.tokens[held_out:], model.context_length, config.batch_size, config.seed)
        if config.validation.period:
            Batches(data.tokens[:held_out], model.context_length, config.batch_size, 0)
        num_parameters = count_parameters(repr(model), model)
    except (ValueError, DataError) as error:
        raise ConfigError(f"{error} ({where})" if where else str(error)) from error
    tokens = config.batch_size // config.accumulate * model.context_length
    per_token = model.num_layers * (14 * model.d_model + 3 * model.ff_width) + 3 * model.vocab_size
    if model.example_block().attention.explicit:
        per_token += model.num_layers * model.num_heads * model.context_length * 3  # scores are kept
    memory = num_parameters * 16 + tokens * per_token * BYTES[config.precision]
    return Estimate(num_parameters, memory, no_op_reasons(model, config.precision))


_counts: dict[str, int] = {}


def count_parameters(key: str, model: ModelConfig) -> int:
    """Trainable parameters, tied weights once; remembered by `key`, since many trials share a model."""
    if key not in _counts:
        with torch.device("meta"):
            _counts[key] = sum(p.numel() for p in Transformer(model).parameters() if p.requires_grad)
    return _counts[key]

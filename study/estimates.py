"""What a trial will need, before it is run: parameters, memory, and what will change nothing."""

from dataclasses import dataclass, replace

from models.transformer import no_op_reasons
from study.config import ConfigError, TrialConfig
from study.data import Batches, DataError, Tokens
from study.imported import ImportedSection
from study.rehearsal import rehearse

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
    keeps: a guide for choosing batch sizes, not a bound. Of an imported model it is the parameters'
    alone. Raises ConfigError.
    """
    length = config.model.context_length
    try:
        held_out = int(len(data.tokens) * config.validation.fraction)
        Batches(data.tokens[held_out:], length, config.batch_size, config.seed)
        if config.validation.period:
            Batches(data.tokens[:held_out], length, config.batch_size, 0)
        found = rehearse(config, data.vocab_size)
        if config.record.activations and not found.has_blocks:
            raise ConfigError(
                "record.activations finds no list of like blocks in the imported model; "
                "known: grad_norms, update_ratios, model_update"
            )
        if config.record.activations and config.compile and isinstance(config.model, ImportedSection):
            raise ConfigError(
                "record.activations sees nothing of a compiled imported model; known: compile: false"
            )
    except (ValueError, DataError) as error:
        raise ConfigError(f"{error} ({where})" if where else str(error)) from error
    memory = found.num_parameters * 16 + found.num_frozen * 4
    if isinstance(config.model, ImportedSection):
        unseen = "attn_logit_max is not recorded: an imported model's attention can't be seen into"
        return Estimate(found.num_parameters, memory, [unseen] if config.record.activations else [])
    model = replace(config.model, vocab_size=data.vocab_size + (0 if config.model.causal else 1))
    per_token = model.num_layers * (14 * model.d_model + 3 * model.ff_width) + 3 * model.vocab_size
    if model.example_block().attention.explicit:
        per_token += model.num_layers * model.num_heads * length * 3  # scores are kept
    memory += config.batch_size // config.accumulate * length * per_token * BYTES[config.precision]
    return Estimate(found.num_parameters, memory, no_op_reasons(model, config.precision))

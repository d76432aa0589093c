"""One transformer, causal or bidirectional; reads from top to bottom.

    tokens -> embedding + positions -> blocks -> (final norm) -> head -> logits

Every choice that a study compares sits behind a table: the norm (norms.py), its placement
(blocks.py), what happens to the attention scores (attention.py). This file knows none by name. What
has one form only (z-loss, soft cap, the embedding's scale, norm and gradient) is a field of
ModelConfig.

    model = Transformer(ModelConfig(block="deepnorm", norm="rms"))
    objective, cross_entropy = model.loss(inputs_BxT, targets_BxT)
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.losses import IGNORED_TARGET, Criterion, cross_entropy
from models.norms import NORMS, wide
from models.placement import Block, is_normless
from models.scores import SCORE_TYPES
from models.variants import Spec, build, check, normalize, unknown

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variants of a model; checks itself, so that a bad one is never built."""

    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    d_model: int = 48
    """Width of the residual stream."""
    num_layers: int = 8
    """Blocks; each holds an attention and an MLP sublayer."""
    num_heads: int = 4
    """Attention heads; divides d_model."""
    context_length: int = 48
    """The longest sequence, in tokens; positions are learned."""
    d_ff: int | None = None
    """Hidden width of the MLP; None is 4 * d_model."""
    norm: Spec = "layer"
    """What normalizes: an entry of NORMS."""
    block: Spec = "pre"
    """Where it sits, with residual scale and init: an entry of BLOCKS."""
    relaxation: Spec = "none"
    """What keeps attention scores sane: an entry of RELAXATIONS."""
    causal: bool = True
    """True: each position sees itself and the past; False: all see all (masked prediction)."""
    tie_embeddings: bool = False
    """The head uses the token embedding's matrix."""
    scores: str = "float32"
    """Type that attention scores are stored in before the softmax: float32, bfloat16, float16."""
    embedding_grad_scale: float = 1.0
    """Embedding gradients times this, forward unchanged; 1 is off (GLM-130B: 0.1, arXiv 2210.02414).
    With a tied head only the gradient through the input side shrinks. Under Adam with an untied head
    it acts through the global norm alone, as Adam undoes a constant factor."""
    embedding_norm: bool = False
    """A norm right after the embedding (BLOOM; placements that have one already refuse it)."""
    embedding_scale: float | str = 1.0
    """Embedding and positions times this; 1 is off, sqrt_d is sqrt(d_model) (Takase et al. 2023,
    arXiv 2312.16903): a shortcut that is large beside the branches."""
    z_loss: float = 0.0
    """Adds z_loss * mean((log Z)^2) to the objective, log Z in float32; 0 is off (PaLM 1e-4, OLMo 2
    1e-5). Keeps output logits from drifting."""
    logit_softcap: float = 0.0
    """Logits become cap * tanh(logits / cap); 0 is off (Gemma 2: 30)."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.scores not in SCORE_TYPES:
            raise unknown("score type", str(self.scores), SCORE_TYPES, "model.scores")
        check("norm", NORMS, self.norm, "model.norm")
        check("relaxation", RELAXATIONS, self.relaxation, "model.relaxation")
        check("block", BLOCKS, self.block, "model.block")
        if self.embedding_norm and is_normless(self):
            raise ValueError("embedding_norm on with norm none normalizes nothing (model.embedding_norm)")
        reason = self.placement.refuses(self)
        if reason:
            raise ValueError(f"{reason} (model.block)")
        self.example_block()  # the values of options are judged by the variants' constructors

    def _check_numbers(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "context_length", "d_ff"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} {number}; must be at least 1 (model.{name})")
        for name in ("embedding_grad_scale", "z_loss", "logit_softcap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} {getattr(self, name)}; must be finite and not below 0 (model.{name})"
                )
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} does not divide into num_heads {self.num_heads} (model.num_heads)"
            )
        scale = self.embedding_scale
        if scale != "sqrt_d" and (isinstance(scale, str) or not 0 < scale < math.inf):
            raise ValueError(f"embedding_scale {scale!r}; a number above 0 or sqrt_d (model.embedding_scale)")

    @property
    def placement(self) -> type[Block]:
        """The class that `block` names."""
        return cast(type[Block], BLOCKS[normalize(self.block)["name"]])

    @property
    def embedding_factor(self) -> float:
        """embedding_scale as a number."""
        return math.sqrt(self.d_model) if self.embedding_scale == "sqrt_d" else float(self.embedding_scale)

    @property
    def ff_width(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def example_block(self) -> Block:
        """One block of this model without memory or random numbers spent: to ask its variants."""
        with torch.device("meta"):
            return self.new_block(0)

    def new_block(self, index: int) -> Block:
        """Block `index` (from 0), before its init."""
        block: Block = build("block", BLOCKS, self.block, self, index, where="model.block")
        return block


class Transformer(nn.Module):
    """Logits over the vocabulary for every position of (B, T) tokens.

    Weights come from torch's global random state: the same seed gives the same bits. Embeddings and
    head start from N(0, 0.02) unless the placement says otherwise, so arms differ in blocks alone.
    """

    def __init__(self, config: ModelConfig, criterion: Criterion = cross_entropy) -> None:
        super().__init__()
        self.config, self.criterion = config, criterion
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.input_norm = config.placement.input_norm(config)
        self.blocks = nn.ModuleList(config.new_block(index) for index in range(config.num_layers))
        self.final_norm = config.placement.final_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.logit_gain = config.placement.logit_gain(config)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        config.placement.init_ends(
            self.token_embedding.weight, self.position_embedding.weight, self.head.weight
        )
        for block in self._blocks():
            block.finish()
        self._observing = False
        self._observed: dict[str, Tensor] = {}

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def forward(self, tokens_BxT: Tensor) -> Tensor:
        """(B, T) int64 token ids to (B, T, V) logits. ValueError beyond context_length."""
        x_BxTxD = self.input_norm(self._embed(tokens_BxT))
        for index, block in enumerate(self.blocks):
            x_BxTxD = block(x_BxTxD)
            if self._observing:
                self._observed[f"act_rms/block{index}"] = (
                    wide(x_BxTxD.detach()).square().mean().sqrt().float()
                )
        if self._observing:
            layers = [block.attention.observed_max for block in self._blocks()]
            self._observed["attn_logit_max"] = torch.stack([m for m in layers if m is not None]).amax()
        logits_BxTxV = self.logit_gain(self.head(self.final_norm(x_BxTxD)))
        if self.config.logit_softcap:
            cap = self.config.logit_softcap
            logits_BxTxV = cap * torch.tanh(wide(logits_BxTxV) / cap)
        return logits_BxTxV

    def _embed(self, tokens_BxT: Tensor) -> Tensor:
        length = tokens_BxT.shape[1]
        if length > self.config.context_length:
            raise ValueError(f"sequence of {length} tokens; context_length is {self.config.context_length}")
        x_BxTxD = self.token_embedding(tokens_BxT) + self.position_embedding.weight[:length]
        if self.config.embedding_factor != 1.0:
            x_BxTxD = x_BxTxD * self.config.embedding_factor
        if self.config.embedding_grad_scale != 1.0:
            # lerp between equal ends is those ends to the bit; only one of them has a gradient
            x_BxTxD = torch.lerp(x_BxTxD.detach(), x_BxTxD, self.config.embedding_grad_scale)
        return x_BxTxD

    def loss(self, inputs_BxT: Tensor, targets_BxT: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, loss), float32 scalars; targets of -100 don't count.

        The objective is what to differentiate; the loss, by default the mean cross entropy in nats, is
        what arms compare.
        """
        logits_BxTxV = wide(self(inputs_BxT))
        loss = self.criterion(logits_BxTxV, targets_BxT)
        objective = loss
        if self.config.z_loss:
            counted_BxT = targets_BxT != IGNORED_TARGET
            squares_BxT = logits_BxTxV.logsumexp(dim=-1).square().masked_fill(~counted_BxT, 0.0)
            objective = loss + self.config.z_loss * squares_BxT.sum() / counted_BxT.sum()
        return objective, loss.detach()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Every trainable parameter in exactly one named group; tied weights in 'embedding'."""
        ends = (self.token_embedding, self.position_embedding, self.input_norm)
        parts = {"embedding": [p for end in ends for p in end.parameters()]}
        for index, block in enumerate(self._blocks()):
            parts |= {f"block{index}.{name}": group for name, group in block.groups().items()}
        parts["final_norm"] = list(self.final_norm.parameters())
        parts["head"] = [*self.head.parameters(), *self.logit_gain.parameters()]
        seen: set[int] = set()
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameters in parts.items():
            new = [p for p in parameters if p.requires_grad and id(p) not in seen]
            seen.update(map(id, new))
            if new:
                groups[name] = new
        return groups

    def after_step(self) -> None:
        """Apply the rules that act after an optimizer step; no host synchronization."""
        for block in self._blocks():
            block.after_step()
        self.config.placement.after_step_ends(self.token_embedding.weight, self.head.weight)

    def observe(self, on: bool) -> None:
        """From the next forward on, keep (or stop keeping) what observations() returns."""
        self._observing = on
        self._observed = {}
        for block in self._blocks():
            block.attention.watch = on

    def observations(self) -> dict[str, Tensor]:
        """0-dim float32 tensors of the last observed forward, on the device.

        'attn_logit_max': the largest scale * q.k over blocks, batch, heads and visible pairs, before
        any cap or softmax. 'act_rms/block<i>': RMS of the residual stream after block i.
        """
        return dict(self._observed)


def no_op_reasons(config: ModelConfig, precision: str) -> list[str]:
    """Which chosen variants change nothing in this model, each with its reason, as sentences.

    precision: the autocast type of the trial (fp32, bf16, fp16).
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    block = config.example_block()
    reasons = [block.no_op(config, precision), block.attention.relaxation.no_op(config, precision)]
    return [reason for reason in reasons if reason]

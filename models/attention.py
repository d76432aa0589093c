"""Multi-head self-attention, and what keeps its scores sane.

A relaxation is an object per attention layer with four seams: it may change queries and keys, the
scale, the scores on their way to the softmax, and the weights after the optimizer step. One that
leaves the scores alone runs on torch's fused attention; one that touches them (or a model that
stores them in half precision) takes the explicit path below.

The explicit path emulates storage: a half-precision kernel multiplies half inputs, sums in float32
and rounds what it writes. Here everything is computed in float32 (float64 stays float64) and
rounded to the stored type wherever such a kernel would write: scaled queries, keys, scores, every
rewriting of the scores, the softmax's output. So 65504 overflows to inf on a CPU as on a GPU.
Gradients pass the rounding unrounded: in a half-precision training the loss scale keeps them in
range, and this study is of the forward overflow.

Shapes: B batch, H heads, T positions, K head width, D model width.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.norms import wide
from models.variants import Table, build

if TYPE_CHECKING:
    from models.transformer import ModelConfig

SCORE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Rounded(torch.autograd.Function):
    """Values rounded through a narrower type; gradients as if nothing had happened."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast would turn products to half precision behind the stored type's back."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class Relaxation(nn.Module):
    """What is done to attention scores; this class does nothing and is what others start from.

    touches_scores: the explicit path is needed. watches_logits: the largest logit of every head is
    wanted in each training forward (see Attention.logit_max_H).
    """

    touches_scores = False
    watches_logits = False

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__()
        self.d_head = config.d_model // config.num_heads
        self.num_heads = config.num_heads
        self.stored_type = SCORE_TYPES[config.scores]

    def stored(self, x: Tensor) -> Tensor:
        """`x` after a round trip through the type that scores are stored in."""
        if self.stored_type is torch.float32:
            return x
        return cast(Tensor, _Rounded.apply(x, self.stored_type))

    def scale(self, scale: float) -> float:
        """The factor on q k^T, given the placement's (1 / sqrt(d_head), but for nGPT)."""
        return scale

    def query_key(self, q_BxHxTxK: Tensor, k_BxHxTxK: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as they enter the product."""
        return q_BxHxTxK, k_BxHxTxK

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """(B, H, T, T) scores as stored, before the mask: (scale q) k^T, the query scaled first."""
        return self.stored(self.stored(q * scale) @ self.stored(k).mT)

    def weights(self, scores: Tensor, hidden_TxT: Tensor | None) -> Tensor:  # noqa: ARG002
        """Softmax of masked scores; `hidden_TxT` is true where a query may not look."""
        return self.stored(torch.softmax(scores, dim=-1))

    def attach(self, attention: "Attention", mlp: nn.Module) -> None:
        """Change the sublayers themselves, after every init has run."""

    def after_step(self, attention: "Attention") -> None:
        """Act on the weights after an optimizer step; no host synchronization."""

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        """Why this relaxation changes nothing in this model, or None where it can."""
        return None


class Plain(Relaxation):
    """softmax(q k^T / sqrt(d_head)) v, fused.

    Vaswani et al. 2017, arXiv 1706.03762. scale `pre` divides the query before the product, `post`
    divides the stored product, which then overflows sqrt(d_head) times earlier.
    `post` matters only where scores are stored in float16; elsewhere it equals `pre` to rounding.
    """

    def __init__(self, config: "ModelConfig", *, scale: str = "pre") -> None:
        super().__init__(config)
        if scale not in ("pre", "post"):
            raise ValueError(f"relaxation none: unknown scale '{scale}'; known: post, pre")
        self.touches_scores = scale == "post"

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if not self.touches_scores:
            return super().scores(q, k, scale)
        return self.stored(self.stored(self.stored(q) @ self.stored(k).mT) * scale)

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        if not self.touches_scores or config.scores == "float16":
            return None
        return (
            "relaxation none with scale post equals scale pre up to rounding: "
            f"scores are stored in {config.scores}, which these logits cannot overflow"
        )


class PBRelax(Relaxation):
    """softmax(((q / (alpha sqrt(d_head))) k^T - max_j) alpha): precision-bottleneck relaxation.

    Ding et al. 2021 (CogView), arXiv 2105.13290, sec 2.4; alpha 32 there. Equal to plain attention
    in exact arithmetic, and bit for bit where alpha is a power of two and nothing under- or
    overflows. Matters only where scores are stored in float16: form `pre_matmul` raises the largest
    storable |logit| from 65504 to alpha * 65504; `post_matmul` (found in later code) divides what
    has already overflowed and protects nothing. A no-op in float32 and bfloat16 scores.
    """

    touches_scores = True

    def __init__(self, config: "ModelConfig", *, alpha: float = 32.0, form: str = "pre_matmul") -> None:
        super().__init__(config)
        if not alpha > 0 or not math.isfinite(alpha):
            raise ValueError(f"relaxation pb_relax: alpha {alpha}; must be finite and above 0")
        if form not in ("pre_matmul", "post_matmul"):
            raise ValueError(f"relaxation pb_relax: unknown form '{form}'; known: post_matmul, pre_matmul")
        self.alpha, self.form = float(alpha), form

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if self.form == "pre_matmul":
            return super().scores(q, k, scale / self.alpha)
        return self.stored(super().scores(q, k, scale) / self.alpha)

    def weights(self, scores: Tensor, hidden_TxT: Tensor | None) -> Tensor:
        # The row's maximum is a shift of the softmax: its gradient is exactly zero in sum.
        largest = scores.detach().amax(dim=-1, keepdim=True)
        return super().weights(self.stored(self.stored(scores - largest) * self.alpha), hidden_TxT)

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        if config.scores != "float16":
            return (
                f"pb_relax (alpha {self.alpha:g}) equals none in exact arithmetic; scores are stored "
                f"in {config.scores}, which these logits cannot overflow"
            )
        if self.form == "post_matmul":
            return (
                "pb_relax in its post_matmul form is unprotective: it divides scores that have "
                "already overflowed float16, and fails where none fails"
            )
        return None


class Attention(nn.Module):
    """Self-attention over (B, T, D): separate projections without bias, then `out`.

    scale: factor on q k^T, None for 1 / sqrt(d_head). on_query_key: a placement's own change of
    queries and keys. inner_norm: a placement's norm just before `out`. After a forward with
    `watch` on, or under a relaxation that watches, logit_max_H holds every head's largest logit
    scale * q.k over batch and visible pairs, in float32 on the device.
    """

    def __init__(
        self,
        config: "ModelConfig",
        *,
        scale: float | None = None,
        on_query_key: nn.Module | None = None,
        inner_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        width, self.num_heads, self.causal = config.d_model, config.num_heads, config.causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.relaxation: Relaxation = build(
            "relaxation", RELAXATIONS, config.relaxation, config, where="model.relaxation"
        )
        self.on_query_key = on_query_key
        self.inner_norm = inner_norm
        self.scale = self.relaxation.scale(
            1.0 / math.sqrt(width // self.num_heads) if scale is None else scale
        )
        self.explicit = self.relaxation.touches_scores or self.relaxation.stored_type is not torch.float32
        self.watch = False
        self.logit_max_H: Tensor | None = None

    def forward(self, x_BxTxD: Tensor) -> Tensor:
        q, k, v = (self._heads(p(x_BxTxD)) for p in (self.query, self.key, self.value))
        if self.on_query_key is not None:
            q, k = self.on_query_key(q, k)
        q, k = self.relaxation.query_key(q, k)
        if self.watch or (self.relaxation.watches_logits and self.training):
            self._keep_largest_logit(q, k)
        if self.explicit:
            y = self._attend(q, k, v)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        y_BxTxD = y.transpose(1, 2).reshape(x_BxTxD.shape)
        return self.out(y_BxTxD if self.inner_norm is None else self.inner_norm(y_BxTxD))

    def _heads(self, x_BxTxD: Tensor) -> Tensor:
        return x_BxTxD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _hidden(self, length: int, device: torch.device) -> Tensor | None:
        if not self.causal:
            return None
        return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with without_autocast(q.device.type):
            scores = self.relaxation.scores(wide(q), wide(k), self.scale)
            hidden = self._hidden(q.shape[-2], q.device)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            return self.relaxation.weights(scores, hidden) @ wide(v)

    @torch.no_grad()
    def _keep_largest_logit(self, q: Tensor, k: Tensor) -> None:
        with without_autocast(q.device.type):
            logits = (wide(q) * self.scale) @ wide(k).mT
            hidden = self._hidden(q.shape[-2], q.device)
            if hidden is not None:
                logits = logits.masked_fill(hidden, -math.inf)
            largest_H = logits.amax(dim=(0, 2, 3)).float()
        # Micro-batches of one step add up to one maximum; whoever reads it for a step sets it to None.
        before = self.logit_max_H
        self.logit_max_H = largest_H if before is None else torch.maximum(before, largest_H)


RELAXATIONS: Table = {
    "none": Plain,
    "pb_relax": PBRelax,
}

"""How attention scores are stored, and the seams through which a relaxation may act on them.

The explicit path (sublayers.py) emulates storage: a half-precision kernel multiplies half inputs,
sums in float32 and rounds what it writes. Here everything is computed in float32 (float64 stays
float64) and rounded to the stored type wherever such a kernel would write: scaled queries, keys,
scores, every rewriting of the scores, the softmax's output. So 65504 overflows to inf on a CPU as on
a GPU. Gradients pass the rounding unrounded: in a half-precision training the loss scale keeps them
in range, and this study is of the forward overflow.

Shapes: B batch, H heads, T positions, K head width.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from models.sublayers import MLP, Attention
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

    touches_scores: the explicit path is needed. watches_logits: gather_logits() wants the
    largest logit of every head in each training forward. sizes_query_key: it acts through the
    length of queries and keys, so a placement that fixes this length leaves it nothing to do.
    """

    touches_scores = False
    watches_logits = False
    sizes_query_key = False

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

    def gather_logits(self, largest_H: Tensor) -> None:
        """Take note of a training forward's largest logit by head."""

    def attach(self, attention: "Attention", mlp: "MLP") -> None:
        """Change the sublayers themselves, after every init has run."""

    def after_step(self, attention: "Attention") -> None:
        """Act on the weights after an optimizer step; no host synchronization."""

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        """Why this relaxation changes nothing in this model, or None where it can."""
        return None

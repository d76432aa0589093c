"""The two sublayers of a block: multi-head self-attention and the MLP.

Both map (B, T, D) to (B, T, D), have no biases, and leave gaps for a placement: an inner norm just
before the matrix that writes to the residual stream (Magneto), a gain on what enters the
nonlinearity, another scale or normalization of queries and keys (nGPT).

Shapes: B batch, H heads, T positions, K head width, D model width.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention import RELAXATIONS, Relaxation, without_autocast
from models.norms import wide
from models.variants import build

if TYPE_CHECKING:
    from models.transformer import ModelConfig


class Attention(nn.Module):
    """softmax(scale q k^T) v by head, then `out`; the relaxation may change any part of it.

    scale: factor on q k^T, None for 1 / sqrt(d_head). on_query_key: a placement's own change of
    queries and keys. With `watch` on, a forward leaves observed_max: the largest logit scale * q.k
    over batch, heads and visible pairs, 0-dim float32 on the device. A relaxation that watches is
    given the same by head in training.
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
        self.observed_max: Tensor | None = None

    def forward(self, x_BxTxD: Tensor) -> Tensor:
        q, k, v = (self._heads(p(x_BxTxD)) for p in (self.query, self.key, self.value))
        if self.on_query_key is not None:
            q, k = self.on_query_key(q, k)
        q, k = self.relaxation.query_key(q, k)
        gathers = self.relaxation.watches_logits and self.training
        if self.watch or gathers:
            self._keep_largest_logit(q, k, gathers)
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
        # Made anew each time: a buffer would be lost in a model built on the meta device.
        return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with without_autocast(q.device.type):
            scores = self.relaxation.scores(wide(q), wide(k), self.scale)
            hidden = self._hidden(q.shape[-2], q.device)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            return self.relaxation.weights(scores, hidden) @ wide(v)

    @torch.no_grad()
    def _keep_largest_logit(self, q: Tensor, k: Tensor, gathers: bool) -> None:
        with without_autocast(q.device.type):
            logits = (wide(q) * self.scale) @ wide(k).mT
            hidden = self._hidden(q.shape[-2], q.device)
            if hidden is not None:
                logits = logits.masked_fill(hidden, -math.inf)
            largest_H = logits.amax(dim=(0, 2, 3)).float()
        if self.watch:
            self.observed_max = largest_H.amax()
        if gathers:
            self.relaxation.gather_logits(largest_H)


class MLP(nn.Module):
    """down(inner_norm(gelu(up_gain(up(x))))); the two in the middle are gaps, empty by default."""

    def __init__(
        self,
        config: "ModelConfig",
        *,
        up_gain: nn.Module | None = None,
        inner_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.d_model, bias=False)
        self.up_gain = up_gain
        self.inner_norm = inner_norm

    def forward(self, x_BxTxD: Tensor) -> Tensor:
        hidden_BxTxF = self.up(x_BxTxD)
        if self.up_gain is not None:
            hidden_BxTxF = self.up_gain(hidden_BxTxF)
        hidden_BxTxF = functional.gelu(hidden_BxTxF)
        return self.down(hidden_BxTxF if self.inner_norm is None else self.inner_norm(hidden_BxTxF))

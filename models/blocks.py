"""Where the norm sits in a block, what scales the residual, and the init that goes with it.

In the formulas F is a sublayer (attention, then MLP), l a layer's index from 1 and L the number of
layers (one layer = both sublayers). A block class also says what it wants at the two ends of the
stack and which settings it refuses, so that transformer.py needs no branch on its name.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.inits import deepnorm_constants, init_xavier, layerscale_value, magneto_gain
from models.placement import Block, is_normless, norm_of
from models.sphere import NGPT
from models.sublayers import MLP, Attention
from models.variants import Table

if TYPE_CHECKING:
    from models.transformer import ModelConfig


class PreNorm(Block):
    """x' = x + F(norm(x)), and a norm before the head.

    Xiong et al. 2020, arXiv 2002.04745. Trains without warm-up; the hidden norm grows with depth.
    Init gpt2.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PostNorm(Block):
    """x' = norm(x + F(x)), no norm before the head.

    Vaswani et al. 2017, arXiv 1706.03762. Needs warm-up: at init gradients grow toward the output
    (Xiong et al. 2020). Init xavier.
    """

    own_init = "xavier"
    has_final_norm = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class DeepNorm(Block):
    """x' = norm(alpha x + F(x)), alpha = (2L)^(1/4); no norm before the head.

    Wang et al. 2022 (DeepNet), arXiv 2203.00555, sec 4.3: encoder-only and decoder-only alike. Init
    xavier, times beta = (8L)^(-1/4) on value, output and both MLP matrices, not on query and key.
    Bounds the model's update at any depth; matters in deep stacks.
    """

    has_final_norm = False

    def __init__(self, config: "ModelConfig", index: int) -> None:
        super().__init__(config, index)
        self.alpha, self.beta = deepnorm_constants(config.num_layers)

    def init_weights(self) -> None:
        init_xavier(self.attention, self.mlp, gain=self.beta)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(self.alpha * x + self.attention(x))
        return self.mlp_norm(self.alpha * x + self.mlp(x))


class SandwichNorm(Block):
    """x' = x + norm2(F(norm1(x))), and a norm before the head.

    Ding et al. 2021 (CogView), arXiv 2105.13290, sec 2.4. Each branch enters the residual stream at
    the norm's own scale, so no branch can blow it up. Init gpt2 without the 1 / sqrt(2L), which the
    outer norm would undo.
    """

    divides_residual_init = False

    def __init__(self, config: "ModelConfig", index: int, *, init: str | None = None) -> None:
        super().__init__(config, index, init=init)
        self.attention_out_norm = norm_of(config)
        self.mlp_out_norm = norm_of(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out_norm(self.attention(self.attention_norm(x)))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class PeriNorm(SandwichNorm):
    """x' = x + norm_out(F(norm_in(x))), with a norm on the embedding [M] and one before the head.

    Kim et al. 2025, arXiv 2502.02732. The block is Sandwich-LN's; the embedding's norm is what
    differs. Hidden norms grow linearly, not exponentially, as branches learn. Init as sandwich.
    """

    @classmethod
    def refuses(cls, config: "ModelConfig") -> str | None:
        if config.embedding_norm:
            return "block 'peri' already normalizes the embedding: leave embedding_norm off"
        return None

    @classmethod
    def input_norm(cls, config: "ModelConfig") -> nn.Module:
        return norm_of(config)


class ReorderedNorm(Block):
    """x' = x + norm(F(x)), no norm on the input of F, one before the head.

    OLMo 2 (2024), arXiv 2501.00656, there with norm rms and qk_norm. Not Peri-LN: F sees the
    residual stream as it is. Init N(0, 0.02) throughout (its sec 3.2) under the name gpt2.
    """

    divides_residual_init = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_norm(self.attention(x))
        return x + self.mlp_norm(self.mlp(x))


class SubNorm(PreNorm):
    """x' = x + W_o norm2(F(norm1(x))): pre plus a norm before the output and second MLP matrix.

    Wang et al. 2022 (Magneto), arXiv 2210.06423: in attention after the heads, in the MLP after the
    activation. Init xavier, times sqrt(ln(2L)) on value, output and both MLP matrices. A norm before
    the head.
    """

    def __init__(self, config: "ModelConfig", index: int) -> None:
        super().__init__(config, index)

    def new_attention(self, config: "ModelConfig") -> Attention:
        return Attention(config, inner_norm=norm_of(config))

    def new_mlp(self, config: "ModelConfig") -> MLP:
        return MLP(config, inner_norm=norm_of(config, config.ff_width))

    def init_weights(self) -> None:
        init_xavier(self.attention, self.mlp, gain=magneto_gain(self.num_layers))


class ScaledNorm(Block):
    """x' = x + F(norm(x) / sqrt(l)), l from 1, and an unscaled norm before the head.

    LN-Scaling: Sun et al. 2025, arXiv 2502.05795. Damps the growth of the hidden variance in deep
    layers. Init gpt2. A no-op with one layer.
    """

    def __init__(self, config: "ModelConfig", index: int, *, init: str | None = None) -> None:
        super().__init__(config, index, init=init)
        self.norm_gain = 1 / math.sqrt(index + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_gain * self.attention_norm(x))
        return x + self.mlp(self.norm_gain * self.mlp_norm(x))

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        return (
            "ln_scaling equals pre in a model of one layer: 1 / sqrt(1) is 1"
            if config.num_layers == 1
            else None
        )


class ReZero(Block):
    """x' = x + a F(x), one learnable a per layer for both sublayers, starting at 0; no norm anywhere.

    Bachlechner et al. 2020, arXiv 2003.04887. Starts as the identity at any depth; reported unstable
    in half precision (DeepNet, footnote 3). Init xavier. Takes norm none only.
    """

    own_init = "xavier"
    has_final_norm = False

    def __init__(self, config: "ModelConfig", index: int, *, init: str | None = None) -> None:
        super().__init__(config, index, init=init)
        self.alpha = nn.Parameter(torch.zeros(()))

    @classmethod
    def refuses(cls, config: "ModelConfig") -> str | None:
        if not is_normless(config):
            return f"block 'rezero' replaces the norm: takes norm none, not {config.norm!r}"
        return None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.alpha * self.attention(x)
        return x + self.alpha * self.mlp(x)


class LayerScale(Block):
    """x' = x + diag(g) F(norm(x)), g learnable, and a norm before the head.

    Touvron et al. 2021 (CaiT), arXiv 2103.17239. value: what g starts from; None is by depth, 0.1 to
    18 layers, 1e-5 to 24, then 1e-6 [M] (DeiT III's code has 1e-4 [S]). Deep stacks start near the
    identity. Init gpt2.
    """

    def __init__(
        self, config: "ModelConfig", index: int, *, value: float | None = None, init: str | None = None
    ) -> None:
        super().__init__(config, index, init=init)
        start = layerscale_value(config.num_layers) if value is None else float(value)
        self.attention_scale = nn.Parameter(torch.full((config.d_model,), start))
        self.mlp_scale = nn.Parameter(torch.full((config.d_model,), start))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_scale * self.attention(self.attention_norm(x))
        return x + self.mlp_scale * self.mlp(self.mlp_norm(x))


BLOCKS: Table = {
    "deepnorm": DeepNorm,
    "layerscale": LayerScale,
    "ln_scaling": ScaledNorm,
    "ngpt": NGPT,
    "peri": PeriNorm,
    "post": PostNorm,
    "pre": PreNorm,
    "reordered": ReorderedNorm,
    "rezero": ReZero,
    "sandwich": SandwichNorm,
    "sub": SubNorm,
}

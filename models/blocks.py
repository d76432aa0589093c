"""Where the norm sits in a block, what scales the residual, and the init that goes with it.

A block owns two sublayers, attention and MLP, and maps (B, T, D) to (B, T, D). In the formulas F is
a sublayer and L the number of layers (one layer = attention + MLP). A block class also says what it
wants at the two ends of the stack (a norm on the embedding, a final norm) and which settings it
refuses, so that transformer.py needs no branch on its name.

Inits: `gpt2` is N(0, 0.02) with the matrices that write to the residual stream divided by
sqrt(2 L) (GPT-2's released configuration), `xavier` is Glorot's normal init (Xiong et al. 2020
analyse it; DeepNet and Magneto scale it). init_weights() runs last, after all other init.
"""

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from models.attention import Attention
from models.norms import NORMS
from models.variants import Table, build

if TYPE_CHECKING:
    from models.transformer import ModelConfig

INITS = ("gpt2", "xavier")


class MLP(nn.Module):
    """down(gelu(up(x))) without biases; inner_norm: a placement's norm just before `down`."""

    def __init__(self, config: "ModelConfig", *, inner_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.d_model, bias=False)
        self.inner_norm = inner_norm

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return self.down(hidden if self.inner_norm is None else self.inner_norm(hidden))


def norm_of(config: "ModelConfig", width: int | None = None) -> nn.Module:
    """The configured norm, over d_model unless told otherwise."""
    norm: nn.Module = build("norm", NORMS, config.norm, width or config.d_model, where="model.norm")
    return norm


class Block(nn.Module):
    """The two sublayers with one norm each; subclasses place them.

    init: gpt2 or xavier; None is the placement's own, `own_init`.
    """

    own_init = "gpt2"
    has_final_norm = True
    has_embedding_norm = False

    def __init__(self, config: "ModelConfig", index: int, *, init: str | None = None) -> None:
        super().__init__()
        if init is not None and init not in INITS:
            raise ValueError(f"unknown init '{init}'; known: {', '.join(INITS)} (model.block)")
        self.init = init or self.own_init
        self.index, self.num_layers = index, config.num_layers
        self.attention = Attention(config)
        self.attention_norm = norm_of(config)
        self.mlp = MLP(config)
        self.mlp_norm = norm_of(config)

    @classmethod
    def refuses(cls, config: "ModelConfig") -> str | None:  # noqa: ARG003
        """Why this placement can't be combined with the rest of `config`, or None."""
        return None

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        """Why this placement equals `pre` in this model, or None."""
        return None

    def init_weights(self) -> None:
        """Fill the four attention matrices and the two of the MLP."""
        if self.init == "xavier":
            self._init_xavier(gain=1.0)
        else:
            self._init_gpt2(residual_std=0.02 / math.sqrt(2 * self.num_layers))

    def _init_gpt2(self, residual_std: float) -> None:
        for matrix in (self.attention.query, self.attention.key, self.attention.value, self.mlp.up):
            nn.init.normal_(matrix.weight, std=0.02)
        for matrix in (self.attention.out, self.mlp.down):
            nn.init.normal_(matrix.weight, std=residual_std)

    def _init_xavier(self, gain: float) -> None:
        """Glorot normal; `gain` on all but q and k, whose product the softmax bounds anyway."""
        for matrix in (self.attention.query, self.attention.key):
            nn.init.xavier_normal_(matrix.weight)
        for matrix in (self.attention.value, self.attention.out, self.mlp.up, self.mlp.down):
            nn.init.xavier_normal_(matrix.weight, gain=gain)

    def finish(self) -> None:
        """Init, then whatever the relaxation changes in the sublayers: called once, last."""
        self.init_weights()
        self.attention.relaxation.attach(self.attention, self.mlp)

    def after_step(self) -> None:
        """Rules that act on the weights after an optimizer step."""
        self.attention.relaxation.after_step(self.attention)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """'attention' and 'mlp', norms with their sublayer; what both share goes with attention."""
        named = list(self.named_parameters())
        return {
            "attention": [p for name, p in named if not name.startswith("mlp")],
            "mlp": [p for name, p in named if name.startswith("mlp")],
        }


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

    Vaswani et al. 2017, arXiv 1706.03762. Needs warm-up: gradients grow toward the output (Xiong
    et al. 2020). Init xavier.
    """

    own_init = "xavier"
    has_final_norm = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


def deepnorm_constants(num_layers: int) -> tuple[float, float]:
    """(alpha, beta) of an encoder-only or decoder-only stack: (2L)^(1/4), (8L)^(-1/4)."""
    return (2.0 * num_layers) ** 0.25, (8.0 * num_layers) ** -0.25


def deepnorm_encoder_decoder_constants(
    num_encoder: int, num_decoder: int
) -> tuple[float, float, float, float]:
    """(alpha, beta) of the encoder, then of the decoder, of an encoder-decoder (DeepNet sec 4.3)."""
    both = (num_encoder**4 * num_decoder) ** (1 / 16)
    return 0.81 * both, 0.87 / both, (3.0 * num_decoder) ** 0.25, (12.0 * num_decoder) ** -0.25


class DeepNorm(Block):
    """x' = norm(alpha x + F(x)); Xavier init times beta on value, output and both MLP matrices.

    Wang et al. 2022 (DeepNet), arXiv 2203.00555, sec 4.3: alpha = (2L)^(1/4), beta = (8L)^(-1/4),
    the same for encoder-only and decoder-only. Bounds the model update at any depth; queries and
    keys keep gain 1. No norm before the head.
    """

    has_final_norm = False

    def __init__(self, config: "ModelConfig", index: int) -> None:
        super().__init__(config, index, init="xavier")
        self.alpha, self.beta = deepnorm_constants(config.num_layers)

    def init_weights(self) -> None:
        self._init_xavier(gain=self.beta)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(self.alpha * x + self.attention(x))
        return self.mlp_norm(self.alpha * x + self.mlp(x))


BLOCKS: Table = {
    "deepnorm": DeepNorm,
    "post": PostNorm,
    "pre": PreNorm,
}

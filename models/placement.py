"""What every placement shares: two sublayers, their init, and a say about the stack's two ends.

A placement (blocks.py, sphere.py) subclasses Block, writes its formula in forward() and overrides
what it wants otherwise. A block maps (B, T, D) to (B, T, D).
"""

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from models.inits import INITS, init_gpt2, init_xavier
from models.norms import NORMS
from models.sublayers import MLP, Attention
from models.variants import build, normalize, unknown

if TYPE_CHECKING:
    from models.transformer import ModelConfig


def norm_of(config: "ModelConfig", width: int | None = None) -> nn.Module:
    """The configured norm, over d_model unless told otherwise."""
    norm: nn.Module = build("norm", NORMS, config.norm, width or config.d_model, where="model.norm")
    return norm


def is_normless(config: "ModelConfig") -> bool:
    """Whether the configured norm is the one that does nothing."""
    return issubclass(NORMS[normalize(config.norm)["name"]], nn.Identity)


class Block(nn.Module):
    """The two sublayers with one norm each; a subclass places them.

    init: an entry of INITS; None is the placement's own.
    """

    own_init = "gpt2"
    divides_residual_init = True
    has_final_norm = True

    def __init__(self, config: "ModelConfig", index: int, *, init: str | None = None) -> None:
        super().__init__()
        if init is not None and init not in INITS:
            raise unknown("init", init, INITS, "model.block.init")
        self.init = init or self.own_init
        self.index, self.num_layers = index, config.num_layers
        self.attention = self.new_attention(config)
        self.attention_norm = norm_of(config)
        self.mlp = self.new_mlp(config)
        self.mlp_norm = norm_of(config)

    def new_attention(self, config: "ModelConfig") -> Attention:
        """The attention sublayer."""
        return Attention(config)

    def new_mlp(self, config: "ModelConfig") -> MLP:
        """The MLP sublayer."""
        return MLP(config)

    def finish(self) -> None:
        """Init, then whatever the relaxation changes in the sublayers: called once, after all else."""
        self.init_weights()
        self.attention.relaxation.attach(self.attention, self.mlp)

    def init_weights(self) -> None:
        """Fill the matrices of both sublayers."""
        if self.init == "xavier":
            init_xavier(self.attention, self.mlp)
        else:
            gain = 1 / math.sqrt(2 * self.num_layers) if self.divides_residual_init else 1.0
            init_gpt2(self.attention, self.mlp, residual_gain=gain)

    def after_step(self) -> None:
        """Rules that act on the weights after an optimizer step; no host synchronization."""
        self.attention.relaxation.after_step(self.attention)

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        """Why this placement equals `pre` in this model, or None where it differs."""
        return None

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """'attention' and 'mlp', norms with their sublayer; what both share goes with attention."""
        named = list(self.named_parameters())
        return {
            "attention": [p for name, p in named if not name.startswith("mlp")],
            "mlp": [p for name, p in named if name.startswith("mlp")],
        }

    @classmethod
    def refuses(cls, config: "ModelConfig") -> str | None:  # noqa: ARG003
        """Why this placement makes no sense with the rest of `config`, or None."""
        return None

    @classmethod
    def input_norm(cls, config: "ModelConfig") -> nn.Module:
        """What the embedding passes on its way to the first block."""
        return norm_of(config) if config.embedding_norm else nn.Identity()

    @classmethod
    def final_norm(cls, config: "ModelConfig") -> nn.Module:
        """What the last block's output passes on its way to the head."""
        return norm_of(config) if cls.has_final_norm else nn.Identity()

    @classmethod
    def logit_gain(cls, config: "ModelConfig") -> nn.Module:  # noqa: ARG003
        """What the head's output passes."""
        return nn.Identity()

    @classmethod
    def init_ends(cls, tokens_VxD: Tensor, positions_TxD: Tensor, head_VxD: Tensor) -> None:
        """Fill the matrices outside the blocks: N(0, 0.02), the same for all, as GPT-2."""
        for weight in (tokens_VxD, positions_TxD, head_VxD):
            nn.init.normal_(weight, std=0.02)

    @classmethod
    def after_step_ends(cls, tokens_VxD: Tensor, head_VxD: Tensor) -> None:
        """after_step() for the matrices outside the blocks."""

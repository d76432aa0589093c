"""nGPT, and the parts that keep everything at length one (Loshchilov et al. 2024, arXiv 2410.01131).

Values and scalings are those of NVIDIA's released model: a learnable gain is stored near `scaling`
and used as weight * value / scaling, which sets its effective learning rate.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention import RELAXATIONS
from models.norms import wide
from models.placement import Block, is_normless
from models.sublayers import MLP, Attention
from models.variants import normalize

if TYPE_CHECKING:
    from models.transformer import ModelConfig


def unit(x: Tensor) -> Tensor:
    """x / ||x|| over the last axis."""
    return functional.normalize(wide(x), dim=-1)


@torch.no_grad()
def to_sphere(weight: Tensor, axis: int) -> None:
    """Give every vector of a matrix along `axis` length one, in place."""
    weight.div_(weight.norm(dim=axis, keepdim=True))


class Unit(nn.Module):
    """x / ||x|| as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return unit(x)


class Gain(nn.Module):
    """x * value, elementwise and learnable; stored at `scaling`."""

    def __init__(self, width: int, value: float, scaling: float) -> None:
        super().__init__()
        self.factor = value / scaling
        self.weight = nn.Parameter(torch.full((width,), scaling))

    def effective(self) -> Tensor:
        """The gain as it acts."""
        return self.weight * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.effective()


class SphereStep(nn.Module):
    """h -> unit(h + |a| (unit(F(h)) - h)): a step on the sphere toward the sublayer's answer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rate = Gain(width, value=0.05, scaling=width**-0.5)

    def forward(self, h: Tensor, answer: Tensor) -> Tensor:
        return unit(torch.lerp(h, unit(answer), self.rate.effective().abs()))


class SphereQueryKey(nn.Module):
    """q, k -> s unit(q), s unit(k), with one learnable s for both, by head and coordinate."""

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.gain = Gain(config.d_model, value=1.0, scaling=config.d_model**-0.5)

    def forward(self, q_BxHxTxK: Tensor, k_BxHxTxK: Tensor) -> tuple[Tensor, Tensor]:
        gain_Hx1xK = self.gain.effective().view(self.num_heads, 1, -1)
        q, k = unit(q_BxHxTxK) * gain_Hx1xK, unit(k_BxHxTxK) * gain_Hx1xK
        return q.to(q_BxHxTxK.dtype), k.to(k_BxHxTxK.dtype)


class NGPT(Block):
    """h' = unit(h + |a| (unit(F(h)) - h)): hidden states and all matrices live on the unit sphere.

    Loshchilov et al. 2024, arXiv 2410.01131; constants of NVIDIA's released model. Queries and keys
    are unit vectors times s_qk, the softmax's scale is sqrt(d_head), what enters the MLP's
    nonlinearity is times s_u sqrt(d_model), logits are times s_z; every matrix gets unit vectors
    along d_model at init and after each step. Here with this project's GELU MLP and learned
    positions (SwiGLU and RoPE there). Meant for no weight decay and no warm-up. Takes norm none only.
    """

    has_final_norm = False

    def __init__(self, config: "ModelConfig", index: int) -> None:
        super().__init__(config, index)
        self.attention_step = SphereStep(config.d_model)
        self.mlp_step = SphereStep(config.d_model)

    def new_attention(self, config: "ModelConfig") -> Attention:
        scale = math.sqrt(config.d_model // config.num_heads)
        return Attention(config, scale=scale, on_query_key=SphereQueryKey(config))

    def new_mlp(self, config: "ModelConfig") -> MLP:
        return MLP(config, up_gain=Gain(config.ff_width, value=math.sqrt(config.d_model), scaling=1.0))

    def init_weights(self) -> None:
        std = self.attention.query.weight.shape[1] ** -0.5
        for linear in (*self.attention.children(), *self.mlp.children()):
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=std)
        self._normalize()

    def after_step(self) -> None:
        super().after_step()
        self._normalize()

    def _normalize(self) -> None:
        for reader in (self.attention.query, self.attention.key, self.attention.value, self.mlp.up):
            to_sphere(reader.weight, axis=1)
        for writer in (self.attention.out, self.mlp.down):
            to_sphere(writer.weight, axis=0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_step(x, self.attention(x))
        return self.mlp_step(x, self.mlp(x))

    @classmethod
    def refuses(cls, config: "ModelConfig") -> str | None:
        if not is_normless(config):
            return f"block 'ngpt' normalizes everything itself: takes norm none, not {config.norm!r}"
        if config.embedding_norm or config.embedding_scale != 1.0:
            return "block 'ngpt' normalizes the embedding: embedding_norm and embedding_scale do nothing"
        relaxation = normalize(config.relaxation)["name"]
        if RELAXATIONS[relaxation].sizes_query_key:  # type: ignore[attr-defined]
            return f"block 'ngpt' fixes the length of queries and keys, as relaxation '{relaxation}' would"
        return None

    @classmethod
    def input_norm(cls, config: "ModelConfig") -> nn.Module:  # noqa: ARG003
        return Unit()

    @classmethod
    def logit_gain(cls, config: "ModelConfig") -> nn.Module:
        return Gain(config.vocab_size, value=1.0, scaling=config.d_model**-0.5)

    @classmethod
    def init_ends(cls, tokens_VxD: Tensor, positions_TxD: Tensor, head_VxD: Tensor) -> None:
        super().init_ends(tokens_VxD, positions_TxD, head_VxD)
        cls.after_step_ends(tokens_VxD, head_VxD)

    @classmethod
    def after_step_ends(cls, tokens_VxD: Tensor, head_VxD: Tensor) -> None:
        for weight in (tokens_VxD, head_VxD):
            to_sphere(weight, axis=1)

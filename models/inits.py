"""How the six matrices of a block start, and the constants that make it depend on depth.

`gpt2` and `xavier` are the two inits a study may ask for; DeepNorm and Magneto put a gain on Xavier.
Biases don't exist and norms start at gain 1, so these matrices are all there is. A placement calls
its init last, after all other init: a later hook that starts matrices anew would undo the constants.
"""

import math
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from models.sublayers import MLP, Attention

INITS = ("gpt2", "xavier")


def init_gpt2(attention: "Attention", mlp: "MLP", residual_gain: float) -> None:
    """N(0, 0.02), the two matrices that write to the residual stream times `residual_gain`.

    GPT-2 (Radford et al. 2019, sec 2.3) has residual_gain 1 / sqrt(2 L); OLMo 2 has 1.
    """
    for matrix in (attention.query, attention.key, attention.value, mlp.up):
        nn.init.normal_(matrix.weight, std=0.02)
    for matrix in (attention.out, mlp.down):
        nn.init.normal_(matrix.weight, std=0.02 * residual_gain)


def init_xavier(attention: "Attention", mlp: "MLP", gain: float = 1.0) -> None:
    """N(0, 2 / (fan_in + fan_out)), all but queries and keys times `gain`.

    Glorot & Bengio 2010; the gain's matrices as in DeepNet sec 4.3 and in Magneto.
    """
    for matrix in (attention.query, attention.key):
        nn.init.xavier_normal_(matrix.weight)
    for matrix in (attention.value, attention.out, mlp.up, mlp.down):
        nn.init.xavier_normal_(matrix.weight, gain=gain)


def deepnorm_constants(num_layers: int) -> tuple[float, float]:
    """(alpha, beta) of an encoder-only or decoder-only stack: (2L)^(1/4), (8L)^(-1/4).

    Wang et al. 2022 (DeepNet), arXiv 2203.00555, sec 4.3.
    """
    return (2.0 * num_layers) ** 0.25, (8.0 * num_layers) ** -0.25


def deepnorm_encoder_decoder_constants(
    num_encoder: int, num_decoder: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(alpha, beta) of the encoder and of the decoder of an encoder-decoder (DeepNet sec 4.3)."""
    both = (num_encoder**4 * num_decoder) ** (1 / 16)
    return (0.81 * both, 0.87 / both), ((3.0 * num_decoder) ** 0.25, (12.0 * num_decoder) ** -0.25)


def magneto_gain(num_layers: int) -> float:
    """sqrt(ln(2L)) of an encoder-only or decoder-only stack: Wang et al. 2022, arXiv 2210.06423."""
    return math.sqrt(math.log(2 * num_layers))


def layerscale_value(num_layers: int) -> float:
    """What LayerScale starts from by depth, as in CaiT [M]: 0.1 to 18 layers, 1e-5 to 24, then 1e-6."""
    if num_layers <= 18:
        return 0.1
    return 1e-5 if num_layers <= 24 else 1e-6

"""What normalizes: the norm's kind. Where it sits in a block is blocks.py's business.

A norm maps (..., width) to (..., width) over the last axis, keeps float32 and float64 as they are,
and computes half-precision input in float32. Reached from a study file as `norm: rms` or
`norm: {name: rms, eps: 1.0e-5}`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.variants import Table


def wide(x: Tensor) -> Tensor:
    """`x` in a type that sums of squares can't overflow: half types become float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * g + b.

    Ba et al. 2016, arXiv 1607.06450. eps 1e-5 (torch's default), g = 1, b = 0.
    Matters wherever the residual stream's scale drifts; never a no-op.
    """

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(wide(x))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * g: LayerNorm without centring and bias.

    Zhang & Sennrich 2019, arXiv 1910.07467. eps 1e-6 (Flax's default), g = 1.
    Unlike LayerNorm it sees a constant shift of its input; never a no-op.
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(wide(x), self.weight.shape, self.weight, self.eps)


class ScaleNorm(nn.Module):
    """g * x / ||x||, one learnable length g for the whole layer.

    Nguyen & Salazar 2019, arXiv 1910.05895. g = sqrt(width), so that it starts as RMSNorm does;
    eps 1e-5 is the smallest length divided by. Never a no-op.
    """

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.length = nn.Parameter(torch.tensor(math.sqrt(width)))

    def forward(self, x: Tensor) -> Tensor:
        x = wide(x)
        return x * (self.length / x.norm(dim=-1, keepdim=True).clamp(min=self.eps))


class DyT(nn.Module):
    """g * tanh(a x) + b, a one scalar per layer: squashes, but takes no statistics.

    Zhu et al. 2025, arXiv 2503.10622. a starts at alpha 0.5 (released code; its LLaMA recipes take
    0.8 to 0.2 in attention and MLP, 0.2 to 0.05 in the final one, smaller for wider models), g = 1,
    b = 0. Where |a x| is small it is nearly linear and normalizes nothing.
    """

    def __init__(self, width: int, *, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.weight, torch.tanh(self.alpha * wide(x)))


class NoNorm(nn.Identity):
    """x: no normalization at all, the control arm; no parameters."""

    def __init__(self, width: int) -> None:  # noqa: ARG002 - every norm is built from a width
        super().__init__()


NORMS: Table = {
    "dyt": DyT,
    "layer": LayerNorm,
    "none": NoNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
}

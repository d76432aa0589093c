"""What happens to the gradients between backward and the optimizer's step: the table of rules.

Here are the rules that judge a step by itself; those that remember earlier steps are in
models/adaptive_clips.py, and what a rule is, is in models/clip.py.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from models.adaptive_clips import SPAM, AdaGC, AutoClip, ZClip
from models.bounds import above
from models.clip import TORCH_EPS, Clip, Clipped, Parameters, measured

__all__ = ["CLIPS", "Clip", "Clipped"]


class NoClip(Clip):
    """g' = g. The norm is measured all the same."""

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:  # noqa: ARG002 (the protocol's)
        norm = norm.float()
        return Clipped(norm, norm.clone(), torch.full_like(norm, math.inf), torch.zeros_like(norm) > 0)


class GlobalNorm(Clip):
    """g' = g min(1, c / (||g|| + 1e-6)), ||g|| over all parameters at once (Pascanu et al. 2013, 1211.5063).

    Default c = 1, the common choice. Norm and gradients are those of torch.nn.utils.clip_grad_norm_
    to the bit. Matters on steps whose norm exceeds c; below it, torch multiplies by 1 and the clip
    is a no-op. Under Adam two thresholds that are both below every norm give the same training up to
    Adam's eps. The norm after is computed, ||g|| times the factor: NaN where ||g|| is not finite.
    """

    def __init__(self, *, max_norm: float = 1.0) -> None:
        super().__init__()
        self.max_norm = above("max_norm", max_norm, 0)

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        clip_grads_with_norm_(parameters, self.max_norm, norm)
        norm = norm.float()
        factor = torch.clamp(self.max_norm / (norm + TORCH_EPS), max=1.0)
        return Clipped(norm, norm * factor, torch.full_like(norm, self.max_norm), factor < 1)


class Value(Clip):
    """Every element clamped to [-max_value, max_value]; turns the gradient (torch.nn.utils.clip_grad_value_).

    The default 1.0 has no source: it is for the user to set. Matters where single elements stick out; a
    no-op where the largest element is at most max_value. Cuts inf to max_value, so it is the norm before
    that shows an overflow.
    """

    keeps_direction = False

    def __init__(self, *, max_value: float = 1.0) -> None:
        super().__init__()
        self.max_value = above("max_value", max_value, 0)

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        largest = get_total_norm([p.grad for p in parameters if p.grad is not None], math.inf)
        clip_grad_value_(parameters, self.max_value)
        return measured(parameters, norm, largest > self.max_value)


class AGC(Clip):
    """Unit i: g_i' = g_i min(1, clipping max(||w_i||, eps) / ||g_i||), Brock et al. 2021 (2102.06171).

    A unit is a row (all dimensions but the first), a parameter of one dimension or none is one unit.
    Defaults: eps 1e-3 as in optax, clipping 0.01 [M]. The paper leaves the final linear layer out [M];
    here it is clipped like the rest, because it is often the embedding too. Matters where a unit's
    gradient is large beside its weights, which small gains and biases at 0 are from the start; a no-op
    where clipping is above every ratio.
    """

    keeps_direction = False

    def __init__(self, *, clipping: float = 0.01, eps: float = 1e-3) -> None:
        super().__init__()
        self.clipping = above("clipping", clipping, 0)
        self.eps = above("eps", eps, 0)

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        parameters = [p for p in parameters if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        weights, units = unit_norms(parameters), unit_norms(grads)
        sizes = [unit.numel() for unit in units]
        unit = torch.cat([unit.flatten() for unit in units])
        limit = self.clipping * torch.cat([weight.flatten() for weight in weights]).clamp(min=self.eps)
        factor = torch.where(unit > limit, limit / unit, 1.0)
        for grad, like, scale in zip(grads, units, factor.split(sizes), strict=True):
            grad.mul_(scale.view_as(like))
        return measured(parameters, norm, (factor < 1).any())


def unit_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norms over all dimensions but the first, which are kept with size 1; over all where there is one."""
    return [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)) or None, keepdim=True) for t in tensors]


CLIPS: dict[str, type[Clip]] = {
    "none": NoClip,
    "global_norm": GlobalNorm,
    "value": Value,
    "agc": AGC,
    "zclip": ZClip,
    "autoclip": AutoClip,
    "adagc": AdaGC,
    "spam": SPAM,
}

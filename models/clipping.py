"""What happens to the gradients between backward and the optimizer's step.

A clip sees parameters and changes their `.grad` in place, after accumulation, reduction over ranks
and unscaling. It returns the norm before and the norm after, the threshold it used and whether it
changed anything, as 0-dim tensors on the gradients' device: nothing here waits for the device.

A non-finite norm is reported as it is. The gradients may then be NaN after clipping, as with torch,
and the step has to be skipped: that is what models/guards.py is for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from models.bounds import above

TORCH_EPS = 1e-6  # added to the norm in the quotient by torch.nn.utils.clip_grads_with_norm_


class Clipped(NamedTuple):
    """What a clip saw and did; each a 0-dim tensor, float32 except `clipped`, which is bool."""

    grad_norm: Tensor  # global L2 norm before
    grad_norm_clipped: Tensor  # the same after
    threshold: Tensor  # what the rule held the gradients against; inf where nothing was
    clipped: Tensor  # whether any gradient was made smaller


class Clip:
    """A clipping rule: called once an optimizer step, after backward and before the step.

    Parameters without a gradient are passed over. Where no parameter has one, both norms are 0, the
    threshold is inf and nothing was clipped. A parameter is known by its place in the sequence, so
    the sequence has to be the same in every call.
    """

    keeps_direction: ClassVar[bool] = True  # whether all gradients are multiplied by one number

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Clipped:
        """Clip the gradients of `parameters` in place."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            zero = torch.zeros((), device=parameters[0].device if parameters else None)
            return Clipped(zero, zero.clone(), zero + math.inf, zero > 0)
        with torch.no_grad():
            return self.clip(parameters, get_total_norm(grads))

    def clip(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> Clipped:
        """The rule itself; `norm` is the global norm, and at least one parameter has a gradient."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """What the rule remembers, copied; exact, so that a resumed run goes on bit for bit."""
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember what `state_dict` of the same rule returned."""
        self.state = {name: value.clone() for name, value in state.items()}


class NoClip(Clip):
    """g' = g. The norm is measured all the same."""

    def clip(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> Clipped:  # noqa: ARG002 (the protocol's)
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

    def clip(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> Clipped:
        clip_grads_with_norm_(parameters, self.max_norm, norm)
        norm = norm.float()
        factor = torch.clamp(self.max_norm / (norm + TORCH_EPS), max=1.0)
        return Clipped(norm, norm * factor, torch.full_like(norm, self.max_norm), factor < 1)


CLIPS: dict[str, type[Clip]] = {
    "none": NoClip,
    "global_norm": GlobalNorm,
}

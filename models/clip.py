"""What a clipping rule is: the interface that every entry of CLIPS keeps.

A clip sees parameters and changes their `.grad` in place, after accumulation, reduction over ranks
and unscaling. It returns the norm before and the norm after, the threshold that it held the norm
against and whether it made anything smaller, as 0-dim tensors on the gradients' device: nothing
here waits for the device, and what a rule remembers lives there too.

A non-finite norm is reported as it is and changes nothing that a rule remembers. The gradients may
be NaN after clipping, as with torch, and the step has to be skipped: see models/guards.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

TORCH_EPS = 1e-6  # added to the norm in the quotient by torch.nn.utils.clip_grads_with_norm_
Parameters = Sequence[nn.Parameter]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all tensors at once, 0-dim; over all ranks where they are shares of tensors.

    torch.nn.utils.get_total_norm gives each rank a part of it there (pytorch#170862).
    """
    norm = get_total_norm(tensors)
    return cast(Tensor, norm.full_tensor()) if hasattr(norm, "full_tensor") else norm


class Clipped(NamedTuple):
    """What a clip saw and did; each a 0-dim tensor, float32 except `clipped`, which is bool."""

    grad_norm: Tensor  # global L2 norm before
    grad_norm_clipped: Tensor  # the same after
    threshold: Tensor  # of the global norm; inf where the rule has none (it is looser, or works on parts)
    clipped: Tensor  # whether any gradient was made smaller


class Clip:
    """A clipping rule: called once an optimizer step, after backward and before the step.

    Parameters without a gradient are passed over. Where no parameter has one, both norms are 0, the
    threshold is inf and nothing was clipped. A parameter is known by its place in the sequence, so
    the sequence has to be the same in every call.
    """

    keeps_direction: ClassVar[bool] = True  # whether all gradients are multiplied by one number

    def __init__(self) -> None:
        self.steps = 0  # calls so far; a skipped step counts
        self.state: dict[str, Tensor] = {}

    def __call__(self, parameters: Parameters) -> Clipped:
        """Clip the gradients of `parameters` in place."""
        self.steps += 1
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            zero = torch.zeros((), device=parameters[0].device if parameters else None)
            return Clipped(zero, zero.clone(), zero + math.inf, zero > 0)
        with torch.no_grad():
            norm = total_norm(grads)
            state = self.state or self.first_state(parameters, norm.device)
            self.state = {name: value.to(norm.device) for name, value in state.items()}
            return self.clip(parameters, norm)

    def first_state(self, parameters: Parameters, device: torch.device) -> dict[str, Tensor]:  # noqa: ARG002
        """What the rule remembers before it has seen anything."""
        return {}

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        """The rule itself; `norm` is the global norm, and at least one parameter has a gradient."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What the rule remembers, copied; exact, so that a resumed run goes on bit for bit."""
        return {"steps": self.steps, **{name: value.clone() for name, value in self.state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` of the same rule returned; tensors move at the next call."""
        self.steps = state["steps"]
        self.state = {name: value.clone() for name, value in state.items() if name != "steps"}


def measured(parameters: Parameters, norm: Tensor, clipped: Tensor) -> Clipped:
    """The report of a rule that works on parts of the gradient, whose norm after is measured."""
    after = total_norm([p.grad for p in parameters if p.grad is not None])
    return Clipped(norm.float(), after.float(), torch.full_like(norm, math.inf).float(), clipped)

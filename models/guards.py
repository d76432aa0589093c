"""Which optimizer steps are not taken at all.

A guard sees the step's loss and its gradient norm before clipping, both 0-dim tensors, and answers
with a 0-dim bool tensor on their device: skip this step. `models.optimizers.guarded_step` acts on
it. Neither waits for the device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Guard:
    """A rule that skips steps: called once an optimizer step, before it."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def __call__(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether to skip the step, a 0-dim bool tensor on the device of `grad_norm`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """What the guard remembers, copied; exact, so that a resumed run goes on bit for bit."""
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember what `state_dict` of the same guard returned."""
        self.state = {name: value.clone() for name, value in state.items()}


class NoGuard(Guard):
    """Never skip: a NaN or inf goes into the weights, as in a plain training loop."""

    def __call__(self, loss: Tensor, grad_norm: Tensor) -> Tensor:  # noqa: ARG002 (the protocol's)
        return torch.zeros_like(grad_norm, dtype=torch.bool)


class SkipNonfinite(Guard):
    """Skip where the loss or the norm is NaN or inf, as fp16 training with a loss scaler does.

    Matters on overflow; a no-op on every step whose loss and norm are finite. Without it clipping
    by norm turns one inf into NaN gradients and the step into NaN weights (pytorch#46849).
    """

    def __call__(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        return ~(torch.isfinite(grad_norm) & torch.isfinite(loss.detach().to(grad_norm.device)))


GUARDS: dict[str, type[Guard]] = {
    "none": NoGuard,
    "skip_nonfinite": SkipNonfinite,
}

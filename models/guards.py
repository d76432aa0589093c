"""Which optimizer steps are not taken at all.

A guard sees the step's loss and its gradient norm before clipping, both 0-dim tensors, and answers
with a 0-dim bool tensor on their device: skip this step. `guarded_step` takes the step accordingly.
Neither waits for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.bounds import above, count


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
        """Remember what `state_dict` of the same guard returned; tensors move at the next call."""
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


class SkipOutlier(Guard):
    """Skip where loss or norm > mean + factor sd of its last `window` values, this one not among them.

    The rule of OLMo-core's SkipStep optimizers, sd the sample's, window 128, factor 6. It judges from the
    step on that makes it half a window of values, this one included; a skipped value still enters the
    history, so that a lasting change of level is accepted in the end. One-sided: a sudden fall is taken.
    NaN and inf are skipped too, from the first step on, and neither loss nor norm of such a step enters
    the history, which they would make useless for `window` steps (the original keeps them). Matters at
    spikes of a whole step; a no-op where nothing leaves the band.
    """

    def __init__(self, *, window: int = 128, factor: float = 6.0) -> None:
        super().__init__()
        self.window = count("window", window, 6)  # half of it, less this value, is a sample with an sd
        self.factor = above("factor", factor, 0)

    def __call__(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        device = grad_norm.device
        # rows: loss, norm. float64: the mean of equal float32 values is then that value exactly
        value = torch.stack([loss.detach().to(device), grad_norm]).double()
        if not self.state:
            past = torch.zeros(2, self.window, dtype=torch.float64)
            self.state = {"past": past, "seen": torch.zeros((), dtype=torch.int64)}
        past, seen = self.state["past"].to(device), self.state["seen"].to(device)
        places = torch.arange(self.window, device=device)
        known = (places < seen).double()
        size = known.sum()
        mean = (past * known).sum(1) / size
        deviation = (((past - mean[:, None]) * known).square().sum(1) / (size - 1)).sqrt()
        finite = torch.isfinite(value).all()
        outlier = (value > mean + self.factor * deviation).any() & (seen + 1 >= self.window // 2)
        enters = (places == seen % self.window) & finite
        self.state = {"past": torch.where(enters, value[:, None], past), "seen": seen + finite}
        return outlier | ~finite


def guarded_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """One step of `optimizer` that changes nothing, moments and step counters included, where `skip`.

    `skip` is a 0-dim bool tensor and stays on its device (Adafactor waits for it: its counters live on
    the host). Where it is False, the step is the plain one to the bit. torch's fused kernels take it as
    the `found_inf` of its own loss scaler; the others step, and what they changed is put back, at the
    cost of a copy of weights and moments.
    """
    for part in getattr(optimizer, "parts", [optimizer]):
        if getattr(part, "_step_supports_amp_scaling", False):
            part.found_inf = skip.to(torch.float32)
            try:
                part.step()
            finally:
                del part.found_inf
        else:
            step_and_put_back(part, skip)


@torch.no_grad()
def step_and_put_back(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Step, then where `skip` give weights and state their values from before (new state: 0)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    weights = [p.clone() for p in parameters]
    states = [{name: copied(v) for name, v in optimizer.state.get(p, {}).items()} for p in parameters]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.step()
    for parameter, weight, state in zip(parameters, weights, states, strict=True):
        parameter.copy_(torch.where(skip, weight, parameter))
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                old = state.get(name, torch.zeros_like(value))
                value.copy_(torch.where(skip.to(value.device), old, value))
            elif value != state.get(name) and skip:  # a counter on the host: this waits for the device
                optimizer.state[parameter][name] = state.get(name, 0)
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        changed = {k: v for k, v in before.items() if group[k] is not v and not isinstance(v, Tensor)}
        if changed and skip:
            group.update(changed)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


GUARDS: dict[str, type[Guard]] = {
    "none": NoGuard,
    "skip_nonfinite": SkipNonfinite,
    "skip_outlier": SkipOutlier,
}

"""What happens to the optimizer's moments between steps.

A reset acts on the optimizer, not on gradients, so it is no clipping rule: it is called before each
step with the step's number, may change the moments, and answers with a factor for the learning rate.
"""

import math

import torch
from torch import Tensor

from models.bounds import count

FLOOR = 0.01  # of the learning rate right after a reset, in the code of SPAM


class Reset:
    """A rule for the moments: called before every optimizer step; remembers nothing."""

    def __call__(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Act on `optimizer` before step `step` (from 1); the factor for this step's learning rate."""
        raise NotImplementedError


class NoReset(Reset):
    """Moments are left alone; the factor is 1."""

    def __call__(self, optimizer: torch.optim.Optimizer, step: int) -> float:  # noqa: ARG002
        return 1.0


class MomentumReset(Reset):
    """m = v = 0 at every step that `period` divides, and lr f_k in the k-th step after it, k = 0 ... N - 1.

    f_k = 1 - 0.99 (1 + cos(pi k / (N + 1))) / 2. The second half of SPAM (Huang et al. 2025, 2501.06842):
    period 500, N = warmup_steps = 150 as in the paper's code, which like this one leaves the step counter
    of the bias correction as it is. Made for Adam; sets every tensor of the optimizer's state to 0 except
    the counters. Matters where a spike lives on in the moments; a no-op before step `period`.
    """

    def __init__(self, *, period: int = 500, warmup_steps: int = 150) -> None:
        self.period = count("period", period, 1)
        self.warmup_steps = count("warmup_steps", warmup_steps, 0)

    def __call__(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        since = step % self.period
        if since == 0:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if name != "step" and isinstance(value, Tensor):
                        value.zero_()
        if step < self.period or since >= self.warmup_steps:
            return 1.0
        return 1 - (1 - FLOOR) * (1 + math.cos(math.pi * since / (self.warmup_steps + 1))) / 2


RESETS: dict[str, type[Reset]] = {
    "none": NoReset,
    "momentum_reset": MomentumReset,
}

"""Arithmetic of a step: autocast, and fp16's dynamic loss scaling without waiting for the device.

The order is fixed: backward on the scaled loss, unscale, measure the norm, clip, step. torch's own
GradScaler follows the same rule but reads the overflow flag back to the host at every step.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

AUTOCAST_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 2.0**16  # torch.amp.GradScaler's defaults, here and below
GROWTH_INTERVAL = 2000


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which the forward pass of a trial runs."""
    dtype = AUTOCAST_TYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class LossScale:
    """Scale of the loss: halved at an overflow, doubled after GROWTH_INTERVAL steps without one.

    For fp32 and bf16 it is 1 and stays 1.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self.active = precision == "fp16"
        self.scale = torch.tensor(INITIAL_SCALE if self.active else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.active else loss

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients, in place; an overflow stays inf or NaN."""
        if self.active:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, overflow: Tensor) -> None:
        """After a step whose gradients did (bool, 0-dim) or did not overflow."""
        if not self.active:
            return
        good = torch.where(overflow, 0, self.good_steps + 1)
        grown = torch.where(good == GROWTH_INTERVAL, self.scale * 2.0, self.scale)
        self.scale = torch.where(overflow, self.scale * 0.5, grown)
        self.good_steps = torch.where(good == GROWTH_INTERVAL, 0, good).to(torch.int32)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.scale = state["scale"].to(self.scale.device)
        self.good_steps = state["good_steps"].to(self.scale.device)

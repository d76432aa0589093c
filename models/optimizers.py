"""Optimizers by name, and the one step that a guard may take back.

The optimizers are torch's; what is added is what this project decides for all of them alike: weight
decay acts on parameters of two or more dimensions (matrices, embeddings included) and not on gains
and biases, kernels are the fused ones where torch has them, and every parameter group carries
`initial_lr`, which a schedule multiplies.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.bounds import at_least, decay
from models.variants import Spec, VariantError, build

Named = Iterable[tuple[str, nn.Parameter]]
Groups = list[dict[str, Any]]


def decay_groups(named: Named, weight_decay: float) -> Groups:
    """Two parameter groups: those of two or more dimensions decay, the others do not."""
    trained = [p for _, p in named if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def pair(name: str, betas: Sequence[float]) -> tuple[float, float]:
    """`betas` as a tuple of two floats in [0, 1); a YAML list will do."""
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{name} must be two numbers, got {betas!r}")
    return decay(f"{name}[0]", betas[0]), decay(f"{name}[1]", betas[1])


class AdamW(torch.optim.AdamW):
    """p -= lr (m^ / (sqrt(v^) + eps) + weight_decay p), Loshchilov & Hutter 2019 (1711.05101); torch, fused.

    Defaults are torch's. Invariant to the scale of the loss up to eps, so clipping by a constant
    factor on every step changes nothing.
    """

    def __init__(
        self,
        named: Named,
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        groups = decay_groups(named, at_least("weight_decay", weight_decay, 0))
        lr, eps = at_least("lr", lr, 0), at_least("eps", eps, 0)
        super().__init__(groups, lr=lr, betas=pair("betas", betas), eps=eps, amsgrad=amsgrad, fused=True)


class Adam(torch.optim.Adam):
    """p -= lr m^ / (sqrt(v^) + eps), Kingma & Ba 2015 (1412.6980), weight decay added to g; torch, fused.

    Defaults are torch's. With weight_decay 0, as by default, the same as AdamW without decay.
    """

    def __init__(
        self,
        named: Named,
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        groups = decay_groups(named, at_least("weight_decay", weight_decay, 0))
        lr, eps = at_least("lr", lr, 0), at_least("eps", eps, 0)
        super().__init__(groups, lr=lr, betas=pair("betas", betas), eps=eps, amsgrad=amsgrad, fused=True)


class SGD(torch.optim.SGD):
    """b = momentum b + g, p -= lr b (or lr (g + momentum b) with nesterov); torch, fused.

    Defaults are torch's: no momentum. The update is proportional to the gradient, so unlike under
    Adam every threshold of a clip matters.
    """

    def __init__(
        self,
        named: Named,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        groups = decay_groups(named, at_least("weight_decay", weight_decay, 0))
        lr, momentum = at_least("lr", lr, 0), decay("momentum", momentum)
        if nesterov and momentum == 0:
            raise ValueError("nesterov needs a momentum above 0, got 0")
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
        if momentum:
            # torch makes the buffers at the first step, uninitialized if found_inf says to skip it
            for parameter in (p for group in self.param_groups for p in group["params"]):
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


OPTIMIZERS: dict[str, type] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
}


def build_optimizer(spec: Spec, parameters: nn.Module | Named, where: str = "") -> torch.optim.Optimizer:
    """The optimizer that `spec` names, for a model's or a list of named trainable parameters.

    Every parameter group has `initial_lr`. Raises VariantError for an unknown name or option and
    ValueError for a value out of range, both with `where` at the end.
    """
    named = list(parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters)
    try:
        optimizer = build("optimizer", OPTIMIZERS, spec, named, where=where)
    except VariantError:
        raise
    except ValueError as error:
        raise ValueError(f"{error} ({where})" if where else str(error)) from error
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def guarded_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """One step of `optimizer` that changes nothing, moments and step counters included, where `skip`.

    `skip` is a 0-dim bool tensor and stays on its device. torch's fused kernels take it as the
    `found_inf` of its own loss scaler. Where it is False, the step is the plain one to the bit.
    """
    assert getattr(optimizer, "_step_supports_amp_scaling", False), "a fused optimizer"
    optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]

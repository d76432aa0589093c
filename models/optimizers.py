"""Optimizers by name, and the one step that a guard may take back.

The optimizers are torch's; what is added is what this project decides for all of them alike: weight
decay acts on parameters of two or more dimensions (matrices, embeddings included) and not on gains
and biases, kernels are the fused ones where torch has them, and every parameter group carries
`initial_lr`, which a schedule multiplies.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.bounds import above, at_least, count, decay, number
from models.guards import guarded_step
from models.imports import call, is_import
from models.variants import Spec, VariantError, build, unknown

__all__ = ["OPTIMIZERS", "build_optimizer", "guarded_step"]

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


class Adafactor(torch.optim.Adafactor):
    """v from row and column means, u = g / sqrt(v), p -= lr' u / max(1, RMS(u) / d), Shazeer & Stern 2018.

    lr' = max(eps[1], RMS(p)) min(lr, 1 / sqrt(t)); torch's defaults, so lr is an upper bound relative to
    the weights. It clips its own update (d), so a clip before it changes little. torch's version reads
    norms to the host in every step and keeps its step counter there.
    """

    def __init__(
        self,
        named: Named,
        *,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: Sequence[float | None] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        groups = decay_groups(named, at_least("weight_decay", weight_decay, 0))
        if isinstance(eps, str) or not isinstance(eps, Sequence) or len(eps) != 2 or eps[1] is None:
            raise ValueError(f"eps must be two numbers, of which the first may be null, got {eps!r}")
        small = None if eps[0] is None else at_least("eps[0]", eps[0], 0)
        pair_of_eps = small, at_least("eps[1]", eps[1], 0)
        lr, d = at_least("lr", lr, 0), at_least("d", d, 1)
        if number("beta2_decay", beta2_decay) > 0:
            raise ValueError(f"beta2_decay must be at most 0, got {beta2_decay!r}")
        super().__init__(groups, lr=lr, beta2_decay=beta2_decay, eps=pair_of_eps, d=d)


class Muon(torch.optim.Optimizer):
    """Matrices: p -= lr' orthogonalized momentum (torch.optim.Muon, Jordan et al. 2024); the rest: AdamW.

    Embeddings, the head and everything that has not two dimensions go to AdamW, told by their names
    (a part that ends in `embedding` or is `head`). lr and weight_decay hold for both, which is what
    adjust_lr_fn "match_rms_adamw" (0.2 sqrt(max dimension)) is for; adamw_lr sets AdamW's apart, and
    "original" scales by the shape alone. Other defaults are torch's. Invariant to the scale of a
    matrix's gradient, so a clip by norm acts through the momentum only.
    """

    def __init__(
        self,
        named: Named,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise unknown(
                "adjust_lr_fn of optimizer 'muon'", str(adjust_lr_fn), ["match_rms_adamw", "original"]
            )
        trained = [(name, p) for name, p in named if p.requires_grad]
        matrices = [p for name, p in trained if p.ndim == 2 and not is_at_an_end(name)]
        others = [(name, p) for name, p in trained if p.ndim != 2 or is_at_an_end(name)]
        lr, momentum = at_least("lr", lr, 0), decay("momentum", momentum)
        adamw_lr = lr if adamw_lr is None else at_least("adamw_lr", adamw_lr, 0)
        weight_decay, ns_steps = at_least("weight_decay", weight_decay, 0), count("ns_steps", ns_steps, 1)
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
            )
            self.parts.append(muon)
        if others:
            self.parts.append(AdamW(others, lr=adamw_lr, betas=betas, eps=eps, weight_decay=weight_decay))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.share()

    def share(self) -> None:
        """Let the parts work on this optimizer's groups and state, so that there is one of each."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share()

    def step(self, closure: Any = None) -> Any:
        assert closure is None, "no closure: the loss is not needed"
        for part in self.parts:
            part.step()


def is_at_an_end(name: str) -> bool:
    """Whether a parameter's dotted name says that it is an embedding or the head, here or at Hugging Face."""
    return any("embed" in part or part in ("head", "lm_head", "wte", "wpe") for part in name.split("."))


class StableAdamW(torch.optim.Optimizer):
    """AdamW with lr / max(1, RMS) for each tensor, RMS = sqrt(mean(g^2 / max(v, eps^2))).

    Wortsman et al. 2023 (2304.13013). m and v are averages whose factors carry the bias correction,
    beta_t = beta (1 - beta^(t-1)) / (1 - beta^t); p -= lr' (m / (sqrt(v) + eps) + weight_decay p).
    Defaults are optimi's. It is Adafactor's update clipping in AdamW: matters where v lags behind a
    growing g, where it takes the place of a clip; where no RMS exceeds 1 it is AdamW.
    """

    def __init__(
        self,
        named: Named,
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
    ) -> None:
        groups = decay_groups(named, at_least("weight_decay", weight_decay, 0))
        lr, eps = at_least("lr", lr, 0), above("eps", eps, 0)
        super().__init__(groups, {"lr": lr, "betas": pair("betas", betas), "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "no closure: the loss is not needed"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """One step of one tensor."""
        state, eps = self.state[parameter], group["eps"]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        new_part, new_part_sq = (weight_of_newest(beta, state["step"]) for beta in group["betas"])
        mean.lerp_(grad, new_part)
        square.lerp_(grad.square(), new_part_sq)
        rms = (grad.square() / square.clamp(min=eps**2)).mean().sqrt()
        rate = group["lr"] / rms.clamp(min=1)
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_(rate * mean / (square.sqrt() + eps))


def weight_of_newest(beta: float, step: Tensor) -> Tensor:
    """(1 - beta) / (1 - beta^step): how much the newest value weighs in a bias-corrected moving average."""
    log_beta = math.log(beta) if beta else -math.inf
    return ((1 - beta) / -torch.expm1(step * log_beta)).clamp(max=1)


def build_optimizer(spec: Spec, parameters: nn.Module | Named, where: str = "") -> torch.optim.Optimizer:
    """The optimizer that `spec` names or imports, for the trainable parameters of a model or a named list.

    Every parameter group has `initial_lr`. Raises VariantError for an unknown name or option and
    ValueError for a value out of range, both with `where` at the end.
    """
    named = list(parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters)
    named = [(name, p) for name, p in named if p.requires_grad]
    try:
        if isinstance(spec, Mapping) and is_import(spec):
            optimizer = call("optimizer", spec, named, where=where)
        else:
            optimizer = build("optimizer", OPTIMIZERS, spec, named, where=where)
    except VariantError:
        raise
    except ValueError as error:
        raise ValueError(f"{error} ({where})" if where else str(error)) from error
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


# torch keeps this method from being traced by a wrapper that imports the compiler at its first call: 2 s
# of a core in the driver, which makes optimizers only to judge their options. Nothing traces ours.
_add_param_group = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
if _add_param_group is not None:
    setattr(_add_param_group, "__dynamo_disable", _add_param_group)  # noqa: B010 (a class would mangle it)


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "adafactor": Adafactor,
    "muon": Muon,
    "stable_adamw": StableAdamW,
}

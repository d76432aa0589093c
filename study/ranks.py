"""The processes that train one trial together, each on its share of every batch. Knows no Ray.

A rank sees the whole batch of a step, since it follows from seed and step alone, and trains on its
share; gradients and loss are summed over ranks, weighted by their targets, before anything is
measured. So norm, clip and guard are those of one process with the same batch, on every rank alike.
torch.distributed's default group has to be there (Ray Train makes it; torchrun does too).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.clipping import CLIPS
from models.imports import is_import
from models.variants import normalize
from study.imported import ImportedSection

if TYPE_CHECKING:
    from study.config import TrialConfig

Result = TypeVar("Result")
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Ranks:
    """One process: nothing is shared."""

    rank, size = 0, 1

    def shard(self, model: nn.Module) -> None:
        """Cut the parameters into shares, before the optimizer is made."""

    def wrap(self, model: nn.Module, loss: Loss) -> Loss:  # noqa: ARG002 (the others')
        """`loss`, such that a backward pass from it sums the gradients over ranks."""
        return loss

    def reducing(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around a micro-batch; only with the `last` of a step are gradients summed."""
        return nullcontext()

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over ranks."""
        return value

    def agree(self, value: int) -> int:
        """What the first rank says, on every rank. Waits for the device: at flushes only."""
        return value

    def combine(self, observed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Observations of the ranks' shares as those of the whole batch."""
        return observed

    def state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state of both, as one process would have it; on the first rank at least."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Replicated(Ranks):
    """DistributedDataParallel: every rank holds all parameters, gradients are summed."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module, loss: Loss) -> Loss:
        self.replica = nn.parallel.DistributedDataParallel(_Forward(model, loss))
        return cast(Loss, self.replica)

    def reducing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else cast(AbstractContextManager[Any], self.replica.no_sync())

    def sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def agree(self, value: int) -> int:
        return said_by_the_first(value)

    def combine(self, observed: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, value in observed.items():
            if name.startswith("act_rms/"):  # shares are of one size
                observed[name] = (self.sum(value.square()) / self.size).sqrt()
            else:
                dist.all_reduce(value, dist.ReduceOp.MAX)
        return observed


class Sharded(Replicated):
    """FSDP2: each rank holds its share of every parameter, gradient and moment."""

    def shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in cast(list[nn.Module], getattr(model, "blocks", [])):
            fully_shard(block)
        # By default the root's parameters stay whole after a forward pass without a backward (a probe's).
        self.root = cast("_Root", fully_shard(model, reshard_after_forward=True))

    def wrap(self, model: nn.Module, loss: Loss) -> Loss:  # noqa: ARG002
        return loss

    def reducing(self, last: bool) -> AbstractContextManager[Any]:
        self.root.set_requires_gradient_sync(last)
        return nullcontext()

    def state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        return {"model": of_model, "optimizer": of_optimizer}

    def load_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


class _Forward(nn.Module):
    """A module whose forward is the loss, which is what DistributedDataParallel takes."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(inputs, targets)


class _Root(Protocol):
    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...


PARALLEL: dict[str, type[Ranks]] = {
    "ddp": Replicated,
    "fsdp2": Sharded,
}

# An optimizer that looks at each element alone; the others judge whole tensors, of which a rank has a share.
SHARDED_OPTIMIZERS = ("adamw", "adam", "sgd")
# These change whole matrices, after the step or as parametrizations.
UNSHARDED = ("ngpt", "sigma_reparam", "qk_clip")


def refusal(config: "TrialConfig") -> str | None:
    """Why a trial can't be shared among its workers as it asks; None if it can."""
    shares = config.accumulate * config.workers
    if config.batch_size % shares:
        asked = f"accumulate {config.accumulate}"
        if config.workers > 1:
            asked += f" times workers {config.workers}"
        return f"{asked} must divide batch_size {config.batch_size}"
    if config.workers == 1 or config.parallel != "fsdp2":
        return None
    return _refusal_of_shares(config)


def _refusal_of_shares(config: "TrialConfig") -> str | None:
    for kind, spec in (("model", config.model), ("optimizer", config.optimizer)):
        if isinstance(spec, ImportedSection) or is_import(spec):
            return f"fsdp2 is untried on an imported {kind}; known: ddp"
    if not CLIPS[config.clip["name"]].keeps_direction:
        known = ", ".join(name for name, clip in CLIPS.items() if clip.keeps_direction)
        return f"clip {config.clip['name']} judges whole tensors, fsdp2 has shares of them; known: {known}, or ddp"
    if config.optimizer["name"] not in SHARDED_OPTIMIZERS or config.reset["name"] != "none":
        asked = f"optimizer {config.optimizer['name']} with reset {config.reset['name']}"
        known = ", ".join(SHARDED_OPTIMIZERS)
        return f"{asked} can't work on fsdp2's shares; known: {known} with reset none, or ddp"
    assert not isinstance(config.model, ImportedSection)
    for spec in (config.model.block, config.model.relaxation):
        name = normalize(spec)["name"]
        if name in UNSHARDED:
            return f"{name} changes whole matrices, fsdp2 has shares of them; known: ddp"
    return "compile is untried on fsdp2's shares; known: ddp" if config.compile else None


def said_by_the_first(value: Result) -> Result:
    """What the first rank has as `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def ranks_of(workers: int, parallel: str) -> Ranks:
    """This process's place among those that train a trial of `workers`."""
    if workers == 1:
        return Ranks()
    assert dist.is_initialized() and dist.get_world_size() == workers
    return PARALLEL[parallel]()

"""What is minimized: our own loss, from logits and targets to one number."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

IGNORED_TARGET = -100

Criterion = Callable[[Tensor, Tensor], Tensor]  # (B, T, V) logits, (B, T) targets -> 0-dim


def cross_entropy(logits_BxTxV: Tensor, targets_BxT: Tensor) -> Tensor:
    """Mean over the targets that count, in nats; those of IGNORED_TARGET don't."""
    return functional.cross_entropy(
        logits_BxTxV.flatten(0, 1), targets_BxT.flatten(), ignore_index=IGNORED_TARGET
    )

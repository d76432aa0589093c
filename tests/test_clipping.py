"""Clipping rules hold their thresholds, tell the norms as they are, and leave small gradients alone."""

import math

import pytest
import torch
from torch import Tensor, nn

from models.clipping import CLIPS
from models.variants import VariantError, build


def parameters_with(grads: list[Tensor | None]) -> list[nn.Parameter]:
    """Parameters of ones that carry copies of `grads`."""
    parameters = []
    for grad in grads:
        parameter = nn.Parameter(torch.ones(3) if grad is None else torch.ones_like(grad))
        parameter.grad = None if grad is None else grad.clone()
        parameters.append(parameter)
    return parameters


def random_grads(seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in [(5, 7), (7,), (2, 3, 4)]]


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_global_norm_equals_torch_to_the_bit(max_norm: float, dtype: torch.dtype) -> None:
    grads = [grad.to(dtype) for grad in random_grads()]
    ours, theirs = parameters_with(grads), parameters_with(grads)
    clipped = CLIPS["global_norm"](max_norm=max_norm)(ours)
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(clipped.grad_norm, norm.float())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    after = torch.nn.utils.get_total_norm([p.grad.double() for p in ours])
    assert clipped.grad_norm_clipped.item() == pytest.approx(
        after.item(), rel=1e-2 if dtype.itemsize < 4 else 1e-6
    )
    assert clipped.clipped.item() == (norm.item() > max_norm)


def test_no_clip_measures_and_changes_nothing() -> None:
    parameters = parameters_with(random_grads())
    clipped = CLIPS["none"]()(parameters)
    assert torch.equal(clipped.grad_norm, torch.nn.utils.get_total_norm(random_grads()))
    assert torch.equal(clipped.grad_norm, clipped.grad_norm_clipped)
    assert clipped.threshold.item() == math.inf and not clipped.clipped
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, random_grads(), strict=True))


def test_a_threshold_of_zero_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="max_norm must be above 0, got -1"):
        build("clip", CLIPS, {"name": "global_norm", "max_norm": -1})
    with pytest.raises(VariantError, match="unknown option of clip 'global_norm' 'max_nrom'"):
        build("clip", CLIPS, {"name": "global_norm", "max_nrom": 1.0})

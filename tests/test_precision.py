"""The loss scale follows torch's own, and the recorded norm never carries it."""

import math

import pytest
import torch
from torch import nn

from models.clipping import CLIPS
from study import precision
from study.precision import AUTOCAST_TYPES, GROWTH_INTERVAL, INITIAL_SCALE, LossScale, autocast

CPU = torch.device("cpu")


def overflows(steps: int) -> list[bool]:
    """An overflow pattern: a burst at the start, as scaled trainings have, then seldom, then none."""
    random = torch.Generator().manual_seed(0)
    late = (torch.rand(steps, generator=random) < 0.05).tolist()
    return [step < 5 or (late[step] and step < steps // 2) for step in range(steps)]


def test_the_scale_follows_the_recurrence_of_torchs_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    default = torch.amp.GradScaler("cpu")
    assert default.get_scale() == INITIAL_SCALE == LossScale("fp16", CPU).scale.item()
    assert default.get_growth_interval() == GROWTH_INTERVAL
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 20)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=20), LossScale("fp16", CPU)
    found = []
    for overflow in overflows(300):
        assert ours.scaled(torch.tensor(1.0)) == theirs.scale(torch.tensor(1.0))
        parameter.grad = torch.tensor([math.inf if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(overflow))
        found.append(ours.scale.item())
        assert found[-1] == theirs.get_scale()
    changes = {later / earlier for earlier, later in zip(found, found[1:], strict=False)}
    assert changes == {0.5, 1.0, 2.0} and max(found[150:]) >= 4 * found[150]


def test_the_scale_goes_on_exactly_after_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 20)
    pattern = overflows(200)
    straight = LossScale("fp16", CPU)
    for overflow in pattern:
        straight.update(torch.tensor(overflow))
    for cut in range(90, 130):
        first, second = LossScale("fp16", CPU), LossScale("fp16", CPU)
        for overflow in pattern[:cut]:
            first.update(torch.tensor(overflow))
        second.load_state_dict(first.state_dict())
        for overflow in pattern[cut:]:
            second.update(torch.tensor(overflow))
        assert straight.state_dict() == second.state_dict()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_without_fp16_nothing_is_scaled(name: str) -> None:
    scale = LossScale(name, CPU)
    loss, gradient = torch.tensor(3.0), torch.tensor([2.0])
    assert scale.scaled(loss) is loss and not scale.active
    scale.unscale([gradient])
    scale.update(torch.tensor(True))
    assert gradient.item() == 2.0 and scale.scale.item() == 1.0


def norms(scale: float, max_norm: float) -> tuple[float, float, list[float]]:
    """Norm before and after clipping, and the gradients, of one loss under a loss scale."""
    torch.manual_seed(0)
    layer = nn.Linear(7, 5)
    loss_scale = LossScale("fp16", CPU)
    loss_scale.scale = torch.tensor(scale)
    loss_scale.scaled(layer(torch.randn(3, 7)).square().mean()).backward()
    parameters = list(layer.parameters())
    loss_scale.unscale([p.grad for p in parameters if p.grad is not None])
    clipped = CLIPS["global_norm"](max_norm=max_norm)(parameters)
    gradients = [value for p in parameters if p.grad is not None for value in p.grad.flatten().tolist()]
    return clipped.grad_norm.item(), clipped.grad_norm_clipped.item(), gradients


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_the_norm_and_the_clipped_gradients_do_not_depend_on_the_scale(max_norm: float) -> None:
    """Unscale, measure, clip: were the clip first, the threshold would act on scaled gradients."""
    plain = norms(1.0, max_norm)
    for scale in (2.0**-8, 2.0**8, INITIAL_SCALE, 2.0**40):
        assert norms(scale, max_norm) == plain


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_an_overflow_survives_unscaling(value: float) -> None:
    gradients = [torch.tensor([1.0, value]), torch.tensor([[2.0]])]
    LossScale("fp16", CPU).unscale(gradients)
    assert str(gradients[0][1].item()) == str(value)
    assert gradients[1].item() == 2.0 / INITIAL_SCALE


@pytest.mark.parametrize("name", AUTOCAST_TYPES)
def test_autocast_computes_in_the_type_that_is_named(name: str) -> None:
    layer = nn.Linear(4, 4)
    with autocast(name, CPU):
        found = layer(torch.randn(2, 4)).dtype
    assert found == (AUTOCAST_TYPES[name] or torch.float32)
    assert {"fp32", "bf16", "fp16"} == set(AUTOCAST_TYPES)

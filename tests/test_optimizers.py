"""Optimizers are torch's, and a skipped step leaves no trace in weights, moments or counters."""

import copy

import pytest
import torch
from torch import Tensor, nn

from models.optimizers import OPTIMIZERS, build_optimizer, guarded_step
from models.variants import VariantError

SPECS = [*OPTIMIZERS, {"name": "sgd", "momentum": 0.9}, {"name": "sgd", "momentum": 0.9, "nesterov": True}]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 11))


def fill_grads(network: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def snapshot(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all weights and optimizer tensors, by name."""
    weights = {name: p.detach().clone() for name, p in network.named_parameters()}
    state = optimizer.state_dict()["state"]
    moments = {f"{i}/{key}": v.clone() for i, entry in state.items() for key, v in entry.items()}
    return weights | moments


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_guarded_step_without_a_skip_is_the_plain_step_to_the_bit(spec: dict | str) -> None:
    plain, guarded = model(), model()
    for network, take in [
        (plain, lambda o: o.step()),
        (guarded, lambda o: guarded_step(o, torch.tensor(False))),
    ]:
        optimizer = build_optimizer(spec, network)
        for seed in range(5):
            fill_grads(network, seed)
            take(optimizer)
    assert_same(dict(plain.named_parameters()), dict(guarded.named_parameters()))


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_skipped_step_never_happened(spec: dict | str, first: int) -> None:
    skipping, straight = model(), model()
    with_skip, without = build_optimizer(spec, skipping), build_optimizer(spec, straight)
    for seed in range(first):
        for network, optimizer in [(skipping, with_skip), (straight, without)]:
            fill_grads(network, seed)
            guarded_step(optimizer, torch.tensor(False))
    before = snapshot(skipping, with_skip)
    fill_grads(skipping, 99, scale=torch.nan)
    guarded_step(with_skip, torch.tensor(True))
    after = snapshot(skipping, with_skip)
    assert_same(before, {name: after[name] for name in before})
    for network, optimizer in [(skipping, with_skip), (straight, without)]:
        fill_grads(network, first)
        guarded_step(optimizer, torch.tensor(False))
    assert_same(snapshot(skipping, with_skip), snapshot(straight, without))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_state_goes_through_a_file_and_on_to_the_bit(spec: dict | str) -> None:
    network = model()
    optimizer = build_optimizer(spec, network)
    for seed in range(3):
        fill_grads(network, seed)
        optimizer.step()
    resumed = copy.deepcopy(network)
    second = build_optimizer(spec, resumed)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in [(network, optimizer), (resumed, second)]:
        fill_grads(one, 3)
        other.step()
    assert_same(snapshot(network, optimizer), snapshot(resumed, second))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_matrices_decay_and_gains_do_not(name: str) -> None:
    network = model()
    optimizer = build_optimizer({"name": name, "lr": 0.1, "weight_decay": 0.5}, network)
    fill_grads(network, 0, scale=0.0)
    before = {key: p.detach().clone() for key, p in network.named_parameters()}
    optimizer.step()
    for key, parameter in network.named_parameters():
        assert torch.equal(parameter, before[key]) == (parameter.ndim < 2), key
    assert all(group["initial_lr"] == group["lr"] == 0.1 for group in optimizer.param_groups)


def test_bad_options_name_themselves_and_their_place() -> None:
    with pytest.raises(ValueError, match=r"lr must be at least 0, got -1 \(study.yaml\)"):
        build_optimizer({"name": "sgd", "lr": -1}, model(), where="study.yaml")
    with pytest.raises(ValueError, match="lr must be a finite number, got '1e-2'"):
        build_optimizer({"name": "adam", "lr": "1e-2"}, model())
    with pytest.raises(VariantError, match=r"unknown optimizer 'adamx'.*known: .*adamw.*\(study.yaml\)"):
        build_optimizer("adamx", model(), where="study.yaml")
    with pytest.raises(ValueError, match="betas must be two numbers"):
        build_optimizer({"name": "adamw", "betas": [0.9]}, model())

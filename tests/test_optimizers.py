"""Optimizers are torch's, and a skipped step leaves no trace in weights, moments or counters."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.clipping import CLIPS
from models.optimizers import OPTIMIZERS, build_optimizer, guarded_step
from models.resets import RESETS
from models.variants import VariantError, build

Optimizer = torch.optim.Optimizer
SPECS = [
    *OPTIMIZERS,
    {"name": "adamw", "amsgrad": True},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
]
TAKE, SKIP = torch.tensor(False), torch.tensor(True)


class Network(nn.Module):
    """Parameters of every kind and no forward: an embedding, matrices, vectors, a scalar, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token_embedding = nn.Embedding(11, 6)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 11, bias=False)


def fill_grads(network: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def snapshot(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all weights and optimizer tensors, by name."""
    weights = {name: p.detach().clone() for name, p in network.named_parameters()}
    state = optimizer.state_dict()["state"]
    return weights | {f"{i}/{key}": v.clone() for i, entry in state.items() for key, v in entry.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def trained(spec: dict | str, take: Callable[[Optimizer], object], num_steps: int = 5) -> dict[str, Tensor]:
    network = Network()
    optimizer = build_optimizer(spec, network)
    for seed in range(num_steps):
        fill_grads(network, seed)
        take(optimizer)
    return snapshot(network, optimizer)


# --- the guarded step


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_guarded_step_without_a_skip_is_the_plain_step_to_the_bit(spec: dict | str) -> None:
    assert_same(trained(spec, lambda o: guarded_step(o, TAKE)), trained(spec, lambda o: o.step()))


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_skipped_step_never_happened(spec: dict | str, first: int) -> None:
    skipping, straight = Network(), Network()
    with_skip, without = build_optimizer(spec, skipping), build_optimizer(spec, straight)
    for seed in range(first):
        for network, optimizer in [(skipping, with_skip), (straight, without)]:
            fill_grads(network, seed)
            guarded_step(optimizer, TAKE)
    before = snapshot(skipping, with_skip)
    fill_grads(skipping, 99, scale=torch.nan)
    guarded_step(with_skip, SKIP)
    after = snapshot(skipping, with_skip)
    assert_same(before, {name: after[name] for name in before})
    assert all((after[name] == 0).all() for name in after.keys() - before.keys())
    for network, optimizer in [(skipping, with_skip), (straight, without)]:
        fill_grads(network, first)
        guarded_step(optimizer, TAKE)
    assert_same(snapshot(skipping, with_skip), snapshot(straight, without))


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "adafactor"], ids=str)
def test_guarded_step_reads_no_value(spec: dict | str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = Network()
        optimizer = build_optimizer(spec, network)
        for skip in (torch.ones(()) > 0, torch.ones(()) > 1):  # torch.tensor(True) would carry its value
            for parameter in network.parameters():
                parameter.grad = torch.ones_like(parameter)
            guarded_step(optimizer, skip)


# --- every entry of the table


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_state_goes_through_a_copy_and_on_to_the_bit(spec: dict | str) -> None:
    network = Network()
    optimizer = build_optimizer(spec, network)
    for seed in range(3):
        fill_grads(network, seed)
        optimizer.step()
    resumed = copy.deepcopy(network)
    second = build_optimizer(spec, resumed)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in [(network, optimizer), (resumed, second)]:
        for group in other.param_groups:
            group["lr"] = 0.5 * group["initial_lr"]  # a schedule reaches what really steps
        fill_grads(one, 3)
        other.step()
    assert_same(snapshot(network, optimizer), snapshot(resumed, second))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_without_a_learning_rate_nothing_moves(spec: dict | str) -> None:
    network = Network()
    optimizer = build_optimizer(spec, network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0 * group["initial_lr"]
    fill_grads(network, 0)
    optimizer.step()
    assert_same(before, dict(network.named_parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_matrices_decay_and_gains_do_not(name: str) -> None:
    network = Network()
    optimizer = build_optimizer({"name": name, "lr": 0.1, "weight_decay": 0.5}, network)
    fill_grads(network, 0, scale=0.0)
    before = {key: p.detach().clone() for key, p in network.named_parameters()}
    optimizer.step()
    for key, parameter in network.named_parameters():
        assert torch.equal(parameter, before[key]) == (parameter.ndim < 2), key
    assert all(group["initial_lr"] == group["lr"] == 0.1 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_gradient_or_training_stay(name: str) -> None:
    network = Network()
    network.up.weight.requires_grad_(False)
    optimizer = build_optimizer(name, network)
    before = {key: p.detach().clone() for key, p in network.named_parameters()}
    fill_grads(network, 0)
    network.down.weight.grad = network.norm.weight.grad = None  # the frozen one keeps a stale gradient
    guarded_step(optimizer, TAKE)
    stays = {key for key, p in network.named_parameters() if torch.equal(p, before[key])}
    assert stays == {"up.weight", "down.weight", "norm.weight"}


def test_bad_options_name_themselves_and_their_place() -> None:
    with pytest.raises(VariantError, match=r"unknown optimizer 'adamx'.*known: .*adamw.*\(study.yaml\)"):
        build_optimizer("adamx", Network(), where="study.yaml")
    with pytest.raises(VariantError, match="unknown adjust_lr_fn of optimizer 'muon' 'no'; known: match"):
        build_optimizer({"name": "muon", "adjust_lr_fn": "no"}, Network())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "sgd", "lr": -1}, "lr must be at least 0, got -1"),
        ({"name": "adam", "lr": "1e-2"}, "lr must be a finite number, got '1e-2'"),
        ({"name": "adamw", "betas": [0.9]}, r"betas must be two numbers, got \[0.9\]"),
        ({"name": "adamw", "betas": [0.9, 1]}, r"betas\[1\] must be at least 0 and below 1, got 1"),
        ({"name": "sgd", "nesterov": True}, "nesterov needs a momentum above 0, got 0"),
        ({"name": "adafactor", "beta2_decay": 0.8}, "beta2_decay must be at most 0, got 0.8"),
        ({"name": "adafactor", "eps": 1e-3}, "eps must be two numbers, of which the first may be null"),
        ({"name": "adafactor", "d": 0.5}, "d must be at least 1, got 0.5"),
        ({"name": "muon", "ns_steps": 0}, "ns_steps must be a whole number of at least 1, got 0"),
        ({"name": "stable_adamw", "weight_decay": -1}, "weight_decay must be at least 0, got -1"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_with_its_place(spec: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message + r".*\(study.yaml: trial.optimizer\)"):
        build_optimizer(spec, Network(), where="study.yaml: trial.optimizer")


# --- each against torch or its definition


@pytest.mark.parametrize(
    ("spec", "plain"),
    [
        ("adamw", lambda ps: torch.optim.AdamW(ps, foreach=False, weight_decay=0)),
        ("adam", lambda ps: torch.optim.Adam(ps, foreach=False)),
        ("sgd", lambda ps: torch.optim.SGD(ps, foreach=False)),
        ({"name": "sgd", "momentum": 0.9}, lambda ps: torch.optim.SGD(ps, momentum=0.9, foreach=False)),
        ("adafactor", lambda ps: torch.optim.Adafactor(ps, foreach=False)),
    ],
    ids=["adamw", "adam", "sgd", "sgd with momentum", "adafactor"],
)
def test_named_optimizers_step_like_torch_unfused(spec: dict | str, plain: Callable) -> None:
    network = Network()
    spec = {"weight_decay": 0.0, **(spec if isinstance(spec, dict) else {"name": spec})}
    got = trained(spec, lambda o: o.step())
    optimizer = plain(network.parameters())
    for seed in range(5):
        fill_grads(network, seed)
        optimizer.step()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    got = trained({"name": "muon", "adamw_lr": 2e-3, "betas": [0.8, 0.9]}, lambda o: o.step())
    network = Network()
    hidden = [network.up.weight, network.down.weight]
    ends = [network.token_embedding.weight, network.head.weight]
    gains = [p for p in network.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": ends, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.9), fused=True)
    for seed in range(5):
        fill_grads(network, seed)
        muon.step()
        adamw.step()
    for name, parameter in network.named_parameters():
        assert torch.equal(got[name], parameter), name


def slow_stable_adamw(
    weights: list[float], series: list[list[float]], lr: float, decay: float
) -> list[float]:
    """One tensor under StableAdamW with betas (.9, .99) and eps 1e-6."""
    m = v = [0.0] * len(weights)
    for step, grads in enumerate(series, start=1):
        b1, b2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in (0.9, 0.99))
        m = [b1 * a + (1 - b1) * g for a, g in zip(m, grads, strict=True)]
        v = [b2 * a + (1 - b2) * g * g for a, g in zip(v, grads, strict=True)]
        rms = math.sqrt(sum(g * g / max(u, 1e-12) for g, u in zip(grads, v, strict=True)) / len(v))
        rate = lr / max(1.0, rms)
        weights = [(1 - rate * decay) * w for w in weights]
        weights = [w - rate * a / (math.sqrt(u) + 1e-6) for w, a, u in zip(weights, m, v, strict=True)]
    return weights


def test_stable_adamw_follows_its_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(3, 4, generator=generator))
    start = weight.detach().double().flatten().tolist()
    optimizer = build_optimizer({"name": "stable_adamw", "lr": 0.05, "weight_decay": 0.1}, [("w", weight)])
    series = []
    for step in range(40):
        weight.grad = torch.randn(3, 4, generator=generator) * (30 if step % 10 == 7 else 1)
        series.append(weight.grad.double().flatten().tolist())
        optimizer.step()
    expected = slow_stable_adamw(start, series, 0.05, 0.1)
    assert weight.detach().double().flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_stable_adamw_is_adamw_while_gradients_shrink() -> None:
    network, plain = Network(), Network()
    ours = build_optimizer({"name": "stable_adamw", "lr": 0.01, "weight_decay": 0.0}, network)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0)
    for step in range(10):
        for one, optimizer in [(network, ours), (plain, theirs)]:
            fill_grads(one, 0, scale=0.8**step)
            optimizer.step()
    for a, b in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# --- resets


def test_momentum_reset_empties_the_moments_and_warms_the_rate_up_again() -> None:
    network = Network()
    optimizer = build_optimizer("adamw", network)
    reset = build("reset", RESETS, {"name": "momentum_reset", "period": 5, "warmup_steps": 3})
    factors = []
    for step in range(1, 12):
        fill_grads(network, step)
        factors.append(reset(optimizer, step))
        moments = [state["exp_avg"].abs().max().item() for state in optimizer.state.values()]
        assert all(m == 0 for m in moments) == (step in (1, 5, 10))  # at 1 there are none yet
        assert all(state["step"] == step - 1 for state in optimizer.state.values())
        optimizer.step()
    # 1 - cosine from .99 to 0 over warmup_steps + 1, as torch's schedule gives it
    model = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.99)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(model, 4)
    warm_up = []
    for _ in range(3):
        warm_up.append(1 - cosine.get_last_lr()[0])
        model.step()
        cosine.step()
    assert warm_up[0] == pytest.approx(0.01)
    assert factors == pytest.approx([1.0] * 4 + [*warm_up, 1.0, 1.0] + warm_up[:2])


def test_no_reset_leaves_the_optimizer_alone() -> None:
    network = Network()
    optimizer = build_optimizer("adamw", network)
    fill_grads(network, 0)
    optimizer.step()
    before = snapshot(network, optimizer)
    assert RESETS["none"]()(optimizer, 500) == 1.0
    assert_same(before, snapshot(network, optimizer))


def test_the_estimate_of_spam_is_the_second_moment_of_adam() -> None:
    network = Network()
    optimizer = build_optimizer({"name": "adam", "betas": [0.9, 0.99]}, network)
    clip = build("clip", CLIPS, {"name": "spam", "theta": 4.0, "beta2": 0.99, "period": 15, "grace_steps": 5})
    reset = build("reset", RESETS, {"name": "momentum_reset", "period": 15})
    num_clipped = 0
    for step in range(1, 41):
        fill_grads(network, step)
        num_clipped += clip(list(network.parameters())).clipped.item()
        reset(optimizer, step)
        optimizer.step()
        for index, parameter in enumerate(network.parameters()):
            torch.testing.assert_close(clip.state[f"v{index}"], optimizer.state[parameter]["exp_avg_sq"])
    assert 0 < num_clipped < 40


def test_a_period_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="period must be a whole number of at least 1, got 0"):
        build("reset", RESETS, {"name": "momentum_reset", "period": 0})

"""Clipping rules hold their thresholds, tell the norms as they are, and leave small gradients alone.

Every rule with a memory is held against its recurrence, written slowly in Python's floats, on one
recorded series of 500 gradients with spikes in single tensors, NaN and inf.
"""

import io
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.clipping import CLIPS, Clip, Clipped
from models.variants import VariantError, build, check

Grads = Sequence[Tensor | None]
SHAPES = [(2, 3), (3,), ()]
NAN_STEPS, INF_STEPS = {8, 310}, {120, 311}  # of 1 ... 500: in warm-ups and after them


def parameters_with(grads: Grads) -> list[nn.Parameter]:
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


@cache
def recorded_series(num_steps: int = 500, *, nonfinite: bool = True) -> list[list[Tensor]]:
    """Gradients of norm about 1, with a spike of 5 to 500 times in one tensor at every 20th step or so."""
    generator, chance = torch.Generator().manual_seed(7), random.Random(7)
    series = []
    for step in range(1, num_steps + 1):
        grads = [0.3 * chance.lognormvariate(0, 0.3) * torch.randn(s, generator=generator) for s in SHAPES]
        if chance.random() < 0.05:
            grads[chance.randrange(3)] *= 5 * 10 ** (2 * chance.random())
        if nonfinite and step in NAN_STEPS | INF_STEPS:
            grads[0][1, 1] = math.nan if step in NAN_STEPS else math.inf
        series.append(grads)
    return series


def run(clip: Clip, series: Sequence[Grads]) -> list[tuple[Clipped, list[Tensor]]]:
    """What the clip reported at each step, and the gradients that it left."""
    steps = []
    for grads in series:
        parameters = parameters_with(grads)
        clipped = clip(parameters)
        steps.append((clipped, [p.grad for p in parameters if p.grad is not None]))
    return steps


@cache
def recorded_run(kind: type[Clip]) -> list[tuple[Clipped, list[Tensor]]]:
    """The whole series under the rule's defaults; for reading only."""
    return run(kind(), recorded_series())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=1.5e38), torch.nan_to_num(b, nan=1.5e38))


def global_norm(grads: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(x) ** 2 for grad in grads for x in grad.double().flatten()))


# --- the plain rules


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_global_norm_equals_torch_to_the_bit(max_norm: float, dtype: torch.dtype) -> None:
    grads = [grad.to(dtype) for grad in random_grads()]
    ours, theirs = parameters_with(grads), parameters_with(grads)
    clipped = CLIPS["global_norm"](max_norm=max_norm)(ours)
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(clipped.grad_norm, norm.float())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    tolerance = 1e-2 if dtype.itemsize < 4 else 1e-6
    assert clipped.grad_norm_clipped.item() == pytest.approx(
        global_norm([p.grad for p in ours]), rel=tolerance
    )
    assert clipped.clipped.item() == (norm.item() > max_norm)


def test_no_clip_measures_and_changes_nothing() -> None:
    parameters = parameters_with(random_grads())
    clipped = CLIPS["none"]()(parameters)
    assert torch.equal(clipped.grad_norm, torch.nn.utils.get_total_norm(random_grads()))
    assert torch.equal(clipped.grad_norm, clipped.grad_norm_clipped)
    assert clipped.threshold.item() == math.inf and not clipped.clipped
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, random_grads(), strict=True))


def test_value_clip_clamps_each_element_and_cuts_inf() -> None:
    grads = [torch.tensor([3.0, -0.5, -math.inf]), torch.tensor([[0.7]])]
    parameters = parameters_with(grads)
    clipped = CLIPS["value"](max_value=0.6)(parameters)
    assert parameters[0].grad.tolist() == pytest.approx([0.6, -0.5, -0.6])
    assert parameters[1].grad.item() == pytest.approx(0.6)
    assert clipped.grad_norm.item() == math.inf and clipped.clipped
    assert clipped.grad_norm_clipped.item() == pytest.approx(math.sqrt(3 * 0.36 + 0.25))


def test_agc_limits_each_row_by_its_weights() -> None:
    clip = CLIPS["agc"](clipping=0.1, eps=1e-3)
    rows = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]]))
    rows.grad = torch.tensor([[0.0, 2.0], [0.6, 0.8], [0.6, 0.8]])
    bias, scalar = nn.Parameter(torch.tensor([0.6, 0.8])), nn.Parameter(torch.tensor(2.0))
    bias.grad, scalar.grad = torch.tensor([3.0, 4.0]), torch.tensor(-5.0)
    clipped = clip([rows, bias, scalar])
    assert rows.grad[0].tolist() == pytest.approx([0.0, 0.5])  # 0.1 of the norm 5
    assert rows.grad[1].tolist() == pytest.approx([0.6e-4, 0.8e-4])  # 0.1 of eps
    assert torch.equal(rows.grad[2], torch.tensor([0.6, 0.8]))
    assert bias.grad.tolist() == pytest.approx([0.06, 0.08])  # one unit, of norm 1
    assert scalar.grad.item() == pytest.approx(-0.2)
    assert clipped.clipped


# --- the rules that remember, against their recurrences


def slow_zclip(series: Sequence[Sequence[Tensor]], cap: float) -> Iterator[float]:
    """Thresholds of ZClip with alpha .97, z_thresh 2.5 and 25 warm-up norms."""
    warm_up: list[float] = []
    mean = var = 0.0
    for grads in series:
        norm = global_norm(grads)
        if len(warm_up) < 25:
            if math.isfinite(norm):
                warm_up.append(norm)
                mean = sum(warm_up) / len(warm_up)
                var = sum((x - mean) ** 2 for x in warm_up) / len(warm_up)
            yield cap
            continue
        deviation = math.sqrt(var)
        z = (norm - mean) / (deviation + 1e-6)
        threshold = mean + 2.5 * deviation / (z / 2.5) if z > 2.5 else math.inf
        if math.isfinite(norm):
            entering = min(norm, threshold)
            mean = 0.97 * mean + 0.03 * entering
            var = 0.97 * var + 0.03 * (entering - mean) ** 2
        yield min(threshold, cap)


def slow_autoclip(series: Sequence[Sequence[Tensor]], percentile: float) -> Iterator[float]:
    norms: list[float] = []
    for grads in series:
        if math.isfinite(norm := global_norm(grads)):
            norms.append(norm)
        yield float(np.percentile(norms, percentile))


@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        ("zclip", lambda series: slow_zclip(series, 1.0)),
        ({"name": "zclip", "max_grad_norm": None}, lambda series: slow_zclip(series, math.inf)),
        ("autoclip", lambda series: slow_autoclip(series, 10.0)),
        ({"name": "autoclip", "percentile": 93.7}, lambda series: slow_autoclip(series, 93.7)),
    ],
    ids=["zclip", "zclip without a cap", "autoclip", "autoclip at 93.7"],
)
def test_moving_threshold_follows_its_recurrence(
    spec: dict | str, reference: Callable[[list[list[Tensor]]], Iterator[float]]
) -> None:
    series = recorded_series()
    steps = run(build("clip", CLIPS, spec), series)
    num_clipped = 0
    for grads, threshold, (clipped, left) in zip(series, reference(series), steps, strict=True):
        assert clipped.threshold.item() == pytest.approx(threshold, rel=1e-6)
        if math.isfinite(norm := global_norm(grads)):
            num_clipped += norm > threshold
            assert clipped.clipped.item() == (norm > threshold)
            assert global_norm(left) == pytest.approx(min(norm, threshold), rel=1e-5)
    assert 5 < num_clipped < 500  # the series shows both sides of the rule


def test_autoclip_keeps_all_norms_beyond_its_first_room() -> None:
    chance = random.Random(4)
    norms = [chance.lognormvariate(0, 1) for _ in range(2500)]
    clip = CLIPS["autoclip"](percentile=60.0)
    for norm in norms:
        threshold = clip(parameters_with([torch.tensor([norm])])).threshold
    assert threshold.item() == pytest.approx(float(np.percentile(norms, 60.0)), rel=1e-6)


def slow_adagc(series: Sequence[Sequence[Tensor]]) -> Iterator[list[float]]:
    """Norms of the tensors after AdaGC with its defaults."""
    typical = [math.inf] * len(SHAPES)
    for step, grads in enumerate(series, start=1):
        norms = [global_norm([grad]) for grad in grads]
        total = global_norm(grads)
        if step <= 100:
            after = [n * min(1.0, 1.0 / total) for n in norms]
            entering = [min(t, a) for t, a in zip(typical, after, strict=True)]
        else:
            after = [n * min(1.0, 1.05 * t / n) for n, t in zip(norms, typical, strict=True)]
            entering = [0.98 * t + 0.02 * a for t, a in zip(typical, after, strict=True)]
        if math.isfinite(total):
            typical = entering
        yield after


def test_adagc_follows_its_recurrence() -> None:
    series = recorded_series()
    for step, (clipped, left), norms in zip(
        range(1, 501), run(CLIPS["adagc"](), series), slow_adagc(series), strict=True
    ):
        if step not in NAN_STEPS | INF_STEPS:
            assert [global_norm([grad]) for grad in left] == pytest.approx(norms, rel=1e-4)
        assert clipped.threshold.item() == (1.0 if step <= 100 else math.inf)


def test_adagc_does_not_freeze_a_tensor_that_starts_at_zero() -> None:
    clip = CLIPS["adagc"](warmup_steps=2)
    for _ in range(2):
        clip(parameters_with([torch.zeros(2), torch.ones(2)]))
    parameters = parameters_with([torch.ones(2), torch.ones(2)])
    clip(parameters)
    assert torch.equal(parameters[0].grad, torch.ones(2))


def slow_spam(series: Sequence[Sequence[Tensor]], theta: float, period: int, grace: int) -> Iterator[list]:
    """Elements after SPAM with beta2 .9, in one list."""
    v: list[float] = []
    for step, grads in enumerate(series, start=1):
        elements = [float(x) for grad in grads for x in grad.flatten()]
        if not v or step % period == 0:
            v = [0.0] * len(elements)
        if step % period >= grace:
            elements = [
                math.copysign(math.sqrt(theta * u), x) if u > 0 and x * x > theta * u else x
                for x, u in zip(elements, v, strict=True)
            ]
        if all(math.isfinite(float(x)) for grad in grads for x in grad.flatten()):
            v = [0.9 * u + 0.1 * x * x for x, u in zip(elements, v, strict=True)]
        yield elements


def test_spam_follows_its_recurrence() -> None:
    series = recorded_series()
    clip = CLIPS["spam"](theta=9.0, beta2=0.9, period=31, grace_steps=12)
    num_cut = 0
    for grads, elements, (clipped, left) in zip(
        series, slow_spam(series, 9.0, 31, 12), run(clip, series), strict=True
    ):
        got = [float(x) for grad in left for x in grad.flatten()]
        assert got == pytest.approx(elements, rel=1e-4, nan_ok=True)
        given = [float(x) for grad in grads for x in grad.flatten()]
        cut = [abs(a) < abs(b) for a, b in zip(elements, given, strict=True)]
        num_cut += sum(cut)
        assert clipped.clipped.item() == any(cut)
    assert 20 < num_cut < 1000


def test_spam_leaves_an_element_without_history_alone() -> None:
    clip = CLIPS["spam"](grace_steps=2)
    for _ in range(5):
        clip(parameters_with([torch.tensor([1.0, 0.0])]))
    parameters = parameters_with([torch.tensor([1.0, 1.0])])
    clip(parameters)
    assert parameters[0].grad.tolist() == [1.0, 1.0]


# --- contracts, run over the table


def after_thirty_steps(kind: type[Clip]) -> Clip:
    """The rule with its defaults and a history of ordinary gradients."""
    clip = kind()
    run(clip, recorded_series(30, nonfinite=False))
    return clip


def never_raises_the_norm(kind: type[Clip]) -> None:
    for grads, (clipped, left) in zip(recorded_series(), recorded_run(kind), strict=True):
        assert clipped.grad_norm.item() == pytest.approx(global_norm(grads), rel=1e-6, nan_ok=True)
        if torch.isfinite(clipped.grad_norm):
            assert clipped.grad_norm_clipped <= clipped.grad_norm
            assert clipped.grad_norm_clipped.item() == pytest.approx(global_norm(left), rel=1e-5)
            assert clipped.grad_norm_clipped <= clipped.threshold * (1 + 1e-6)
            changed = any(not torch.equal(a, b) for a, b in zip(left, grads, strict=True))
            assert clipped.clipped.item() == changed


def keeps_the_direction_if_it_says_so(kind: type[Clip]) -> None:
    lowest = 1.0
    for grads, (clipped, left) in zip(recorded_series(), recorded_run(kind), strict=True):
        if torch.isfinite(clipped.grad_norm):
            a, b = (torch.cat([g.double().flatten() for g in gs]) for gs in (grads, left))
            lowest = min(lowest, float(a @ b / (a.norm() * b.norm())))
    assert (lowest > 1 - 1e-6) == kind.keeps_direction


def leaves_small_gradients_alone(kind: type[Clip]) -> None:
    clip, grads = after_thirty_steps(kind), [1e-4 * grad for grad in recorded_series(1)[0]]
    [(clipped, left)] = run(clip, [grads])
    assert all(torch.equal(a, b) for a, b in zip(left, grads, strict=True))
    assert torch.equal(clipped.grad_norm, clipped.grad_norm_clipped) and not clipped.clipped


def passes_over_missing_gradients(kind: type[Clip]) -> None:
    ordinary = recorded_series(1)[0]
    clip = after_thirty_steps(kind)
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    nothing = clip(parameters)
    assert nothing.grad_norm.item() == nothing.grad_norm_clipped.item() == 0 and not nothing.clipped
    parameters[2].grad = 1e3 * ordinary[2].clone()
    clipped = clip(parameters)
    assert clipped.grad_norm.item() == pytest.approx(global_norm([1e3 * ordinary[2]]), rel=1e-6)
    assert parameters[0].grad is None and parameters[1].grad is None
    assert kind()([]).grad_norm.item() == 0


def reports_nonfinite_norms_and_forgets_them(kind: type[Clip]) -> None:
    clip = after_thirty_steps(kind)
    before = clip.state_dict()
    for bad, at in [(math.nan, 0), (math.inf, 1), (-math.inf, 1)]:
        grads = [grad.clone() for grad in recorded_series(1)[0]]
        grads[at].view(-1)[0] = bad
        [(clipped, _)] = run(clip, [grads])
        assert same_bits(clipped.grad_norm, torch.tensor(abs(bad)))
    after = clip.state_dict()
    assert all(same_bits(before[name], after[name]) for name in before if name != "steps")


def goes_on_from_its_saved_state_to_the_bit(kind: type[Clip]) -> None:
    series = recorded_series()
    whole = recorded_run(kind)
    for cut in (10, 250):
        first = kind()
        run(first, series[:cut])
        saved = first.state_dict()
        run(first, series[:3])  # what was saved is a copy
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        second = kind()
        second.load_state_dict(torch.load(file))
        for (a, left_a), (b, left_b) in zip(run(second, series[cut:]), whole[cut:], strict=True):
            assert all(same_bits(x, y) for x, y in zip([*a, *left_a], [*b, *left_b], strict=True))


def reports_0_dim_float32_tensors(kind: type[Clip]) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        clip = kind()
        for grads in recorded_series(30):
            parameters = parameters_with([g.to(dtype) for g in grads])
            clipped = clip(parameters)
            assert [t.shape for t in clipped] == [()] * 4
            assert [t.dtype for t in clipped] == [torch.float32] * 3 + [torch.bool]
            assert not any(t.requires_grad for t in clipped)
            assert all(p.grad.dtype == dtype for p in parameters)


@contextmanager
def no_value_can_be_read() -> Iterator[None]:
    """Tensors without values: whatever would wait for the device raises here."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def reads_no_value(kind: type[Clip]) -> None:
    with no_value_can_be_read():
        clip = kind()
        for _ in range(3):
            run(clip, [[torch.ones(shape) for shape in SHAPES]])


CONTRACTS = [
    never_raises_the_norm,
    keeps_the_direction_if_it_says_so,
    leaves_small_gradients_alone,
    passes_over_missing_gradients,
    reports_nonfinite_norms_and_forgets_them,
    goes_on_from_its_saved_state_to_the_bit,
    reports_0_dim_float32_tensors,
    reads_no_value,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("name", CLIPS)
def test_every_clip(name: str, contract: Callable[[type[Clip]], None]) -> None:
    contract(CLIPS[name])


class CapTheLargest(Clip):
    """A made-up rule: every tensor scaled so that its largest element is at most `cap`."""

    keeps_direction = False

    def __init__(self, *, cap: float = 0.5) -> None:
        super().__init__()
        self.cap = cap

    def clip(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> Clipped:
        grads = [p.grad for p in parameters if p.grad is not None]
        factors = [torch.clamp(self.cap / grad.abs().max(), max=1.0) for grad in grads]
        for grad, factor in zip(grads, factors, strict=True):
            grad.mul_(factor)
        after = torch.nn.utils.get_total_norm(grads).float()
        norm = norm.float()
        return Clipped(norm, after, torch.full_like(norm, math.inf), (torch.stack(factors) < 1).any())


def test_a_new_clip_is_one_line_in_the_table() -> None:
    table = {**CLIPS, "cap_the_largest": CapTheLargest}
    assert build("clip", table, {"name": "cap_the_largest", "cap": 0.25}).cap == 0.25
    with pytest.raises(VariantError, match="known: adagc, agc, autoclip, cap_the_largest, global_norm, none"):
        check("clip", table, "cap", "x.yaml: trial.clip")
    with pytest.raises(VariantError, match=r"did you mean 'cap'\?; known: cap \(x.yaml: trial.clip\)"):
        check("clip", table, {"name": "cap_the_largest", "caps": 1}, "x.yaml: trial.clip")
    for contract in CONTRACTS:
        contract(CapTheLargest)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "global_norm", "max_norm": -1}, "max_norm must be above 0, got -1"),
        ({"name": "global_norm", "max_norm": "1e0"}, "max_norm must be a finite number, got '1e0'"),
        ({"name": "global_norm", "max_norm": True}, "max_norm must be a finite number, got True"),
        ({"name": "value", "max_value": 0}, "max_value must be above 0, got 0"),
        ({"name": "agc", "clipping": 0}, "clipping must be above 0, got 0"),
        ({"name": "zclip", "alpha": 1}, "alpha must be at least 0 and below 1, got 1"),
        ({"name": "zclip", "warmup_steps": 0}, "warmup_steps must be a whole number of at least 1, got 0"),
        ({"name": "zclip", "max_grad_norm": 0}, "max_grad_norm must be above 0, got 0"),
        ({"name": "autoclip", "percentile": 101}, "percentile must be at most 100, got 101"),
        ({"name": "autoclip", "percentile": -1}, "percentile must be at least 0, got -1"),
        ({"name": "adagc", "beta": 1.0}, "beta must be at least 0 and below 1, got 1.0"),
        ({"name": "spam", "period": 0.5}, "period must be a whole number of at least 1, got 0.5"),
        ({"name": "spam", "theta": math.nan}, "theta must be a finite number, got nan"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_with_its_name(spec: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("clip", CLIPS, spec)


# --- what must hold between trainings


def train(
    clip: Clip, *, dtype: torch.dtype = torch.float64, eps: float = 1e-20
) -> tuple[Tensor, list[float]]:
    """Weights after 40 steps of Adam on a small regression, and the norms before clipping."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, eps=eps)
    norms = []
    for _ in range(40):
        inputs = torch.randn(16, 4, dtype=dtype)
        optimizer.zero_grad()
        (network(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        norms.append(clip(list(network.parameters())).grad_norm.item())
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in network.parameters()]), norms


def test_under_adam_two_thresholds_below_every_norm_train_alike() -> None:
    low, norms = train(CLIPS["global_norm"](max_norm=1e-3))
    higher, others = train(CLIPS["global_norm"](max_norm=1e-2))
    free, _ = train(CLIPS["none"]())
    assert min(norms + others) > 0.05
    torch.testing.assert_close(low, higher, rtol=1e-4, atol=1e-6)
    assert (low - free).abs().max() > 1e-3  # but both clip


def test_two_thresholds_above_every_norm_train_alike_to_the_bit() -> None:
    high, norms = train(CLIPS["global_norm"](max_norm=1e3), dtype=torch.float32)
    higher, _ = train(CLIPS["global_norm"](max_norm=1e6), dtype=torch.float32)
    free, _ = train(CLIPS["none"](), dtype=torch.float32)
    assert max(norms) < 1e3
    assert torch.equal(high, higher) and torch.equal(high, free)


def test_scaling_the_loss_scales_the_norm_and_unscaling_takes_it_back() -> None:
    weight = nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(0)))
    norms = []
    for scale in (1.0, 1024.0):
        weight.grad = None
        (scale * weight.pow(3).sum()).backward()
        norms.append(CLIPS["none"]()([weight]).grad_norm)
    assert torch.equal(norms[1], 1024 * norms[0])
    weight.grad /= 1024
    assert torch.equal(CLIPS["global_norm"]()([weight]).grad_norm, norms[0])


def test_micro_batches_accumulate_to_the_norm_of_one_batch() -> None:
    weight = nn.Parameter(torch.randn(4, 1, dtype=torch.float64))
    inputs = torch.randn(12, 4, dtype=torch.float64)
    (inputs @ weight).square().mean().backward()
    whole, grad = CLIPS["global_norm"](max_norm=0.5)([weight]), weight.grad
    weight.grad = None
    for micro in inputs.chunk(3):
        ((micro @ weight).square().mean() / 3).backward()
    parts = CLIPS["global_norm"](max_norm=0.5)([weight])
    torch.testing.assert_close(parts.grad_norm, whole.grad_norm)
    torch.testing.assert_close(weight.grad, grad)

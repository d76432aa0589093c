"""Guards say which steps not to take, on the device and exactly."""

import io
import math
import random
import statistics
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models.guards import GUARDS, Guard
from models.variants import build


def recorded_series() -> list[tuple[float, float]]:
    """500 losses and norms, float32 values: spikes of either, a lasting rise at 300, NaN and inf."""
    chance = random.Random(5)
    series = []
    for step in range(1, 501):
        level = 1.0 if step < 300 else 4.0
        loss, norm = level * chance.gauss(3, 0.1), chance.lognormvariate(0, 0.2)
        if chance.random() < 0.02:
            norm *= 40
        if chance.random() < 0.02:
            loss += chance.choice([5, -5])
        loss = {20: math.nan, 400: math.nan}.get(step, loss)
        norm = {21: math.inf, 401: math.inf}.get(step, norm)
        if step in (22, 402):  # right after a non-finite one
            norm = 40.0
        series.append((float(torch.tensor(loss)), float(torch.tensor(norm))))
    return series


def run(guard: Guard, series: list[tuple[float, float]]) -> list[bool]:
    return [guard(torch.tensor(loss), torch.tensor(norm)).item() for loss, norm in series]


def slow_skip_outlier(series: list[tuple[float, float]], window: int, factor: float) -> Iterator[bool]:
    past: list[tuple[float, float]] = []
    for values in series:
        finite = all(map(math.isfinite, values))
        skip = not finite
        if finite and len(past) + 1 >= window // 2:
            for value, earlier in zip(values, zip(*past[-window:], strict=True), strict=True):
                skip |= value > statistics.fmean(earlier) + factor * statistics.stdev(earlier)
        if finite:
            past.append(values)
        yield skip


@pytest.mark.parametrize(
    "options", [{}, {"window": 20, "factor": 3.0}, {"window": 20, "factor": 1.0}], ids=str
)
def test_skip_outlier_follows_its_recurrence(options: dict) -> None:
    series = recorded_series()
    skipped = run(GUARDS["skip_outlier"](**options), series)
    window, factor = options.get("window", 128), options.get("factor", 6.0)
    assert skipped == list(slow_skip_outlier(series, window, factor))
    finite = [all(map(math.isfinite, values)) for values in series]
    assert skipped.count(True) - finite.count(False) > 5


def test_half_a_window_of_values_is_enough_to_judge() -> None:
    ordinary = [(1 + 0.01 * (step % 3), 1.0) for step in range(64)]
    assert run(GUARDS["skip_outlier"](), [*ordinary[:62], (9.0, 1.0)])[-1] is False
    assert run(GUARDS["skip_outlier"](), [*ordinary[:63], (9.0, 1.0)])[-1] is True


def test_a_lasting_change_of_level_is_accepted_in_the_end() -> None:
    guard = GUARDS["skip_outlier"](window=16)
    skipped = run(guard, [(1 + 0.01 * (step % 3), 1.0) for step in range(50)] + [(5.0, 1.0)] * 50)
    assert not any(skipped[:50]) and skipped[50] and not any(skipped[60:])


def test_equal_values_are_no_outliers() -> None:
    assert not any(run(GUARDS["skip_outlier"](), [(0.1, 0.7)] * 300))


@pytest.mark.parametrize("cut", [10, 70, 330])
def test_skip_outlier_goes_on_from_its_saved_state(cut: int) -> None:
    series = recorded_series()
    first, second = GUARDS["skip_outlier"](), GUARDS["skip_outlier"]()
    whole = run(first, series[:cut])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert whole + run(second, series[cut:]) == run(GUARDS["skip_outlier"](), series)
    run(first, series[cut:])
    run_on, resumed = first.state_dict(), second.state_dict()
    assert all(torch.equal(run_on[name], resumed[name]) for name in run_on)


@pytest.mark.parametrize("loss", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", [0.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["skip_nonfinite", "skip_outlier"])
def test_nonfinite_steps_are_skipped_by_the_guard_and_taken_without_it(
    name: str, loss: float, norm: float
) -> None:
    given = torch.tensor(loss), torch.tensor(norm)
    skip = GUARDS[name]()(*given)
    assert skip.item() == (not (math.isfinite(loss) and math.isfinite(norm)))
    assert not GUARDS["none"]()(*given)


@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_answers_with_a_0_dim_truth_and_reads_no_value(name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        guard = GUARDS[name]()
        for _ in range(3):
            loss = torch.ones((), requires_grad=True)
            skip = guard(loss * 2, torch.ones(()))
            assert skip.shape == () and skip.dtype == torch.bool and not skip.requires_grad


def test_a_window_without_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="window must be a whole number of at least 6, got 5"):
        build("guard", GUARDS, {"name": "skip_outlier", "window": 5})
    with pytest.raises(ValueError, match="factor must be above 0, got 0"):
        build("guard", GUARDS, {"name": "skip_outlier", "factor": 0})

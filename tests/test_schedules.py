"""Learning-rate factors equal their closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.variants import VariantError, build
from study.schedules import SCHEDULES


def factor(name: str, step: int, steps: int, **options: float) -> float:
    return build("schedule", SCHEDULES, {"name": name, **options}).factor(step, steps)


@pytest.mark.parametrize("name", SCHEDULES)
@given(warmup=st.integers(0, 50), steps=st.integers(1, 200))
def test_every_schedule_warms_up_linearly_and_stays_within_0_and_1(
    name: str, warmup: int, steps: int
) -> None:
    schedule = SCHEDULES[name](warmup_steps=warmup)
    factors = [schedule.factor(step, steps) for step in range(1, steps + 1)]
    assert all(0 <= value <= 1 for value in factors)
    assert factors[:warmup] == [step / warmup for step in range(1, min(warmup, steps) + 1)]
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)  # and never rises again


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("step", [11, 40, 77, 100])
def test_decays_equal_their_formulas(warmup: int, final: float, step: int) -> None:
    done = (step - warmup) / (100 - warmup)
    options = {"warmup_steps": warmup, "final": final}
    assert factor("linear", step, 100, **options) == pytest.approx(1 + (final - 1) * done)
    half_wave = math.cos(done * math.pi / 2) ** 2
    assert factor("cosine", step, 100, **options) == pytest.approx(final + (1 - final) * half_wave)


def test_a_constant_is_one_after_its_warm_up() -> None:
    assert [factor("constant", step, 9, warmup_steps=2) for step in (1, 2, 3, 9)] == [0.5, 1, 1, 1]


def test_warm_up_stable_decay_is_flat_then_falls_in_its_last_part() -> None:
    factors = {step: factor("wsd", step, 100, warmup_steps=10, decay_fraction=0.2) for step in range(1, 101)}
    assert {factors[step] for step in range(10, 81)} == {1.0}
    for step in range(81, 101):
        assert factors[step] == pytest.approx((100 - step) / 20)


@pytest.mark.parametrize("step", [100, 400, 10_000])
def test_inverse_square_root_is_that_of_the_paper(step: int) -> None:
    # d_model^-0.5 min(step^-0.5, step warmup^-1.5) over its peak
    expected = min(step**-0.5, step * 100**-1.5) / 100**-0.5
    assert factor("inverse_sqrt", step, 10_000, warmup_steps=100) == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_shorter_than_its_warm_up_never_reaches_the_peak(name: str) -> None:
    assert [factor(name, step, 3, warmup_steps=30) for step in (1, 3)] == [1 / 30, 0.1]


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps must not be negative, got -1"):
        factor("constant", 1, 1, warmup_steps=-1)
    for fraction in (0, 1.5):
        with pytest.raises(ValueError, match=r"decay_fraction must lie in \(0, 1\], got"):
            factor("wsd", 1, 1, decay_fraction=fraction)
    with pytest.raises(VariantError, match="unknown option of schedule 'constant' 'final'"):
        factor("constant", 1, 1, final=0.5)

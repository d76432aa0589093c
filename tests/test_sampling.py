"""Downsampling keeps the truth: spikes, ends, non-finite places; and is the same every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from service.sampling import Series, name_of, sample

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def series(values) -> Series:
    values = np.asarray(values, np.float32)
    return Series(np.arange(1, len(values) + 1, dtype=np.int32), values)


def test_a_lone_spike_stays():
    values = np.random.default_rng(0).uniform(1, 2, 100_000)
    for place in np.random.default_rng(1).integers(0, 100_000, 50):
        spiked = values.copy()
        spiked[place] = 3
        assert place + 1 in series(spiked).sampled(2000).steps


def test_a_spike_that_shares_its_bucket_with_an_inf_stays():
    values = np.random.default_rng(0).uniform(1, 2, 100_000)
    values[50_000], values[50_001], values[50_002] = np.inf, 3, np.nan
    kept = series(values).sampled(2000)
    assert {50_001, 50_002, 50_003} <= set(kept.steps.tolist())


def test_a_tail_of_nan_begins_where_it_begins():
    values = np.ones(100_000)
    values[77_777:] = np.nan
    kept = series(values).sampled(500)
    assert kept.nonfinite().steps[0] == 77_778
    assert len(kept.nonfinite()) == 100_000 - 77_777


@given(arrays(np.float32, st.integers(0, 400), elements=FLOATS), st.integers(4, 60))
@settings(max_examples=150, deadline=None)
def test_extremes_ends_and_broken_places_are_always_there(values, num_points):
    whole = series(values)
    kept = whole.sampled(num_points)
    finite = values[np.isfinite(values)]
    assert np.all(np.diff(kept.steps) > 0)
    assert np.array_equal(kept.nonfinite().steps, whole.nonfinite().steps)
    left = kept.values[np.isfinite(kept.values)]
    assert len(left) <= max(num_points, 4)
    if len(finite):
        places = np.flatnonzero(np.isfinite(values))
        assert {places[0] + 1, places[-1] + 1} <= set(kept.steps.tolist())
        assert (left.min(), left.max()) == (finite.min(), finite.max())
    assert np.array_equal(kept.values, values[kept.steps - 1], equal_nan=True)


def test_the_same_question_has_the_same_answer():
    values = np.random.default_rng(0).standard_normal(30_000)
    assert np.array_equal(series(values).sampled(300).steps, series(values).sampled(300).steps)


def test_zooming_in_brings_more_points():
    whole = series(np.random.default_rng(0).standard_normal(100_000))
    wide = whole.sampled(1000).cut(50_000, 51_000)
    near = whole.cut(50_000, 51_000).sampled(1000)
    assert len(near) > 10 * len(wide)


def test_steps_that_are_not_contiguous_keep_their_steps():
    steps = np.arange(10, 50_001, 10, dtype=np.int32)
    values = np.zeros(len(steps))
    values[1234] = 1
    assert steps[1234] in steps[sample(steps, values, 100)]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_broken_value_has_one_name_in_every_type(kind):
    assert [name_of(value) for value in np.array([np.nan, np.inf, -np.inf], kind)] == ["nan", "inf", "-inf"]

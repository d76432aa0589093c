"""Intervals, corrections and seed counts against scipy, tables, and planted truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from study.statistics import (
    MIN_BOOTSTRAP,
    bootstrap_intervals,
    compare,
    decided_by_ratio,
    estimate,
    holm,
    needed_for_width,
    needed_pairs,
    needed_trials,
    sample,
    wilson,
)


def by_seed(values):
    return dict(enumerate(map(float, values)))


def trial(seed, status="finished", **summary):
    return {"seed": seed, "status": status, "summary": {"undefined": {}, **summary}}


# What counts


def test_diverged_losses_count_as_the_initial_loss_and_norms_as_recorded():
    trials = [
        trial(0, final_loss=2.0, initial_loss=4.0, peak_grad_norm=1.0),
        trial(1, "diverged", final_loss=None, initial_loss=4.0, peak_grad_norm=9.0),
    ]
    losses = sample(trials, "final_loss")
    assert losses.values == {0: 2.0, 1: 4.0}
    assert losses.diverged == (1,)
    assert sample(trials, "peak_grad_norm").values == {0: 1.0, 1: 9.0}


def test_an_arm_that_diverged_throughout_still_has_a_loss():
    trials = [trial(seed, "diverged", final_loss=None, initial_loss=4.0) for seed in range(3)]
    found = estimate(list(sample(trials, "final_loss").values.values()))
    assert (found.n, found.mean, found.low, found.high) == (3, 4.0, 4.0, 4.0)


def test_pruned_trials_are_left_out_by_name_and_undefined_values_with_their_reason():
    trials = [
        trial(0, "pruned", final_loss=2.0),
        {"seed": 1, "status": "running", "summary": None},
        {
            "seed": 2,
            "status": "finished",
            "summary": {"settling_step": None, "undefined": {"settling_step": "moves"}},
        },
    ]
    found = sample(trials, "settling_step")
    assert found.values == {}
    assert found.left_out == {0: "pruned", 1: "running"}
    assert found.undefined == {2: "moves"}


# Estimates


def test_an_estimate_equals_scipys_interval():
    values = [3.0, 4.0, 8.0, 5.0]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.mean, found.median) == (5.0, 4.5)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_an_estimate_of_one_seed_has_no_interval_and_of_none_no_value():
    assert (estimate([3.0]).mean, estimate([3.0]).low) == (3.0, None)
    assert estimate([]).mean is None


def test_an_interval_of_a_norm_does_not_go_below_zero():
    assert estimate([0.1, 9.0]).low == 0.0
    assert estimate([-0.1, 9.0]).low < 0


# Comparisons


def test_a_comparison_is_paired_by_seed():
    left, right = {0: 1.0, 1: 12.0, 2: 20.0, 7: 99.0}, {2: 23.0, 1: 14.0, 0: 2.0, 8: 1.0}
    found = compare(left, right)
    expected = stats.ttest_rel([1, 12, 20], [2, 14, 23])
    interval = expected.confidence_interval(0.95)
    assert found.n == 3
    assert found.difference == pytest.approx(-2.0)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_norms_are_compared_by_ratio():
    left, right = by_seed([1.0, 2.1, 3.9]), by_seed([2.0, 4.0, 8.0])
    found = compare(left, right, log=True)
    expected = stats.ttest_rel(np.log([1.0, 2.1, 3.9]), np.log([2.0, 4.0, 8.0]))
    assert found.ratio == pytest.approx((1.0 * 2.1 * 3.9 / 64) ** (1 / 3))
    assert found.p == pytest.approx(expected.pvalue)
    assert found.needed == compare(by_seed(np.log([1.0, 2.1, 3.9])), by_seed(np.log([2.0, 4.0, 8.0]))).needed
    assert found.needed != compare(left, right).needed
    assert found.ratio_high == pytest.approx(math.exp(expected.confidence_interval(0.95).high))
    assert decided_by_ratio("peak_grad_norm")
    assert not decided_by_ratio("final_loss")


def test_a_ratio_with_zero_falls_back_to_the_difference():
    found = compare(by_seed([0.0, 1.0]), by_seed([1.0, 1.5]), log=True)
    assert found.ratio is None
    assert found.difference == -0.75


def test_arms_that_share_no_seeds_are_compared_unpaired():
    found = compare({0: 1.0, 1: 2.0, 2: 4.0}, {5: 3.0, 6: 3.5})
    expected = stats.ttest_ind([1, 2, 4], [3, 3.5], equal_var=False)
    assert found.method == "Welch t"
    assert found.p == pytest.approx(expected.pvalue)
    same = compare({0: 1.0, 1: 1.0}, {5: 1.0, 6: 1.0})
    assert (same.difference, same.p) == (0.0, 1.0)


def test_a_number_is_compared_with_every_seed():
    found = compare(by_seed([2.0, 3.0, 4.0]), 1.0)
    assert found.difference == 2.0
    assert found.p == pytest.approx(stats.ttest_1samp([2, 3, 4], 1.0).pvalue)


def test_identical_and_shifted_pairs_need_no_luck():
    same = compare(by_seed([1.0, 2.0]), by_seed([1.0, 2.0]))
    assert (same.p, same.low, same.high, same.needed) == (1.0, 0.0, 0.0, None)
    shifted = compare(by_seed([1.0, 2.0]), by_seed([2.0, 3.0]))
    assert (shifted.p, shifted.low, shifted.high) == (0.0, -1.0, -1.0)


def test_rounding_is_no_spread():
    found = compare(by_seed([35.0, 35.0, 35.0]), by_seed([28.0, 28.0, 28.0]), log=True)
    assert (found.p, found.needed, found.ratio_low) == (0.0, None, found.ratio)
    assert found.ratio == pytest.approx(1.25)


def test_one_pair_has_a_difference_but_no_certainty():
    found = compare({0: 1.0}, {0: 3.0})
    assert (found.n, found.difference, found.low, found.p, found.needed) == (1, -2.0, None, None, None)
    assert compare({}, {}).n == 0


def test_the_bootstrap_stands_beside_the_interval_from_ten_seeds_on():
    generator = np.random.default_rng(0)
    left, right = generator.normal(1, 1, 40), generator.normal(0, 1, 40)
    many, other = (by_seed(left), by_seed(right)), (by_seed(right), by_seed(left + 5))
    few = tuple(dict(list(side.items())[: MIN_BOOTSTRAP - 1]) for side in many)
    found = bootstrap_intervals([few, many, other])
    assert found[0] is None
    for bounds, (one, two) in zip(found[1:], (many, other), strict=True):
        expected = compare(one, two)
        assert bounds == (pytest.approx(expected.low, abs=0.1), pytest.approx(expected.high, abs=0.1))


# How many seeds


@pytest.mark.parametrize(("effect", "deviation"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0)])
def test_the_needed_seeds_give_the_power_that_is_promised(effect, deviation):
    differences = np.array([effect - deviation, effect, effect + deviation])  # exactly this mean, deviation
    needed = needed_pairs(differences)

    def power(m):
        noncentral = stats.nct(m - 1, effect / deviation * math.sqrt(m))
        return 1 - noncentral.cdf(stats.t.ppf(0.975, m - 1))

    assert power(needed) > 0.78
    assert power(needed - 2) < 0.8


def test_no_number_of_seeds_is_promised_for_no_difference():
    assert needed_pairs(np.array([-1.0, 1.0])) is None
    assert needed_pairs(np.array([1e-4 - 1, 1e-4 + 1])) is None  # more than 10,000
    assert needed_pairs(np.array([1.0, 1.0])) is None


def test_the_seeds_for_a_narrower_interval_give_that_width():
    half = stats.t.ppf(0.975, 4) * 2.0 / math.sqrt(5)  # a deviation of 2 over 5 pairs
    needed = needed_for_width(half, 5, 1.0)
    assert stats.t.ppf(0.975, needed - 1) * 2.0 / math.sqrt(needed) <= 1.0
    assert stats.t.ppf(0.975, needed - 2) * 2.0 / math.sqrt(needed - 1) > 1.0
    assert needed_for_width(half, 5, 0.0) is None


@pytest.mark.parametrize(("count", "n"), [(3, 3), (0, 2), (1, 1), (3, 4)])
def test_the_needed_trials_tell_a_proportion_from_one_half(count, n):
    needed = needed_trials(count, n)
    share = count / n
    assert needed is not None
    z = stats.norm.ppf(0.975)
    assert abs(share - 0.5) > z / (2 * math.sqrt(needed)) or needed == n + 1
    assert abs(share - 0.5) <= z / (2 * math.sqrt(needed - 1))
    assert needed_trials(1, 2) is None


# Proportions and corrections


def test_wilsons_interval_by_hand():
    # (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) for 1 of 5, z = 1.95996
    z2 = stats.norm.ppf(0.975) ** 2
    middle, half = (0.2 + z2 / 10), math.sqrt(z2) * math.sqrt(0.16 / 5 + z2 / 100)
    low, high = wilson(1, 5)
    assert low == pytest.approx((middle - half) / (1 + z2 / 5))
    assert high == pytest.approx((middle + half) / (1 + z2 / 5))
    assert wilson(0, 0) == (0.0, 1.0)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03 times 3, 2, 1: 0.03, 0.04, 0.03 -> never falling: 0.03, 0.04, 0.04
    assert holm([0.03, None, 0.01, 0.02]) == [
        pytest.approx(0.04),
        None,
        pytest.approx(0.03),
        pytest.approx(0.04),
    ]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_lies_between_no_correction_and_bonferroni(p_values):
    for p, adjusted in zip(p_values, holm(p_values), strict=True):
        assert p <= adjusted <= min(1.0, p * len(p_values)) + 1e-12


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=8), st.booleans())
@settings(deadline=None)
def test_swapping_the_arms_turns_the_comparison_around(pairs, log):
    left, right = by_seed(a for a, _ in pairs), by_seed(b for _, b in pairs)
    there, back = compare(left, right, log=log), compare(right, left, log=log)
    assert there.difference == pytest.approx(-back.difference)
    assert there.low == pytest.approx(-back.high)
    assert there.p == pytest.approx(back.p)
    assert there.needed == back.needed


# Planted truth


def simulated_runs(num_runs, num_arms, num_seeds, *, effect, seed):
    """Log norms [run, arm, seed]: a level for each seed that arms share, an effect for each arm but
    the first, and noise of its own for each trial."""
    generator = np.random.default_rng(seed)
    shared = generator.normal(2.0, 0.5, (num_runs, 1, num_seeds))
    effects = np.where(np.arange(num_arms) > 0, effect, 0.0)[:, None]
    return shared + effects + generator.normal(0, 0.4, (num_runs, num_arms, num_seeds))


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_the_interval_covers_a_planted_effect_as_often_as_it_says(num_seeds):
    runs = simulated_runs(200, 6, num_seeds, effect=math.log(0.6), seed=num_seeds)
    covered = []
    for run in runs:
        first, *others = (by_seed(np.exp(arm)) for arm in run)
        for other in others:
            found = compare(other, first, log=True)
            covered.append(found.ratio_low <= 0.6 <= found.ratio_high)
    assert 0.93 <= np.mean(covered) <= 0.97


def test_the_interval_of_differences_covers_them_too_when_the_noise_has_heavy_tails():
    generator = np.random.default_rng(1)
    covered = []
    for _ in range(1000):
        level = generator.normal(3, 1, 5)
        noise = generator.standard_t(4, (2, 5)) * 0.2
        found = compare(by_seed(level - 0.3 + noise[0]), by_seed(level + noise[1]))
        covered.append(found.low <= -0.3 <= found.high)
    assert 0.93 <= np.mean(covered) <= 0.97


def test_equal_arms_are_told_apart_at_most_one_time_in_twenty():
    runs = simulated_runs(2000, 4, 5, effect=0.0, seed=0)
    any_found, each_found = [], []
    for run in runs:
        first, *others = (by_seed(np.exp(arm)) for arm in run)
        p_values = holm([compare(other, first, log=True).p for other in others])
        any_found.append(min(p_values) < 0.05)
        each_found += [p < 0.05 for p in p_values]
    assert np.mean(each_found) <= 0.05
    assert np.mean(any_found) <= 0.05  # the correction is for the family

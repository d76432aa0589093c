"""Stability numbers against series worked by hand and against slow formulas written anew."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from study.glossary import METRICS, SAMPLED, metric_of
from study.metrics import (
    gradient_noise_scale,
    lr_sensitivity,
    model_update,
    summarize,
    update_to_weight,
)
from study.spikes import OLMO_CORE, SPIKE_SCORE, SpikeRule, find_spikes, rolling_mean_deviation


def trace(grad_norm, loss=None, **more):
    """A trace with these norms; the loss falls evenly from 4 to 3 where none is given."""
    norm = np.asarray(grad_norm, np.float32)
    losses = np.linspace(4, 3, len(norm)) if loss is None else loss
    columns = {"step": np.arange(1, len(norm) + 1, dtype=np.int32), "grad_norm": norm}
    columns["loss"] = np.asarray(losses, np.float32)
    return columns | {name: np.asarray(values) for name, values in more.items()}


def figure_line(num_steps=1000):
    """Starts at 10, peaks at 30 at a fifth, is at 8 from two fifths on."""
    steps = [0, 0.2 * num_steps, 0.4 * num_steps, num_steps]
    return np.interp(np.arange(1, num_steps + 1), steps, [10, 30, 8, 8])


# Levels of the norm


def test_a_line_of_the_figure_is_described_by_its_own_numbers():
    summary = summarize(trace(figure_line()))
    assert summary["first_grad_norm"] == pytest.approx(10.1)
    assert summary["start_grad_norm"] == pytest.approx(10.55)  # median of 10.1, 10.2, ..., 11.0
    assert summary["peak_grad_norm"] == 30
    assert summary["peak_step"] == 200
    assert summary["grad_norm_at_40_percent"] == 8  # from 8 % above two fifths down to it, then flat
    assert summary["end_grad_norm"] == 8
    assert summary["median_grad_norm"] == 8
    assert summary["peak_over_median_grad_norm"] == pytest.approx(3.75)
    # Windows of ten steps; their medians come within 8 +- 2 at step 382 (8 + 0.11 * 18 = 9.98): the
    # window 381..390 has the median 9.495, the one before it 10.595.
    assert summary["settling_step"] == 381


def test_ties_at_the_peak_give_the_first_step():
    assert summarize(trace([1, 5, 2, 5, 1]))["peak_step"] == 2


def test_the_end_level_is_the_median_of_the_last_tenth():
    assert summarize(trace(np.arange(1, 101)))["end_grad_norm"] == 95.5


def test_a_constant_norm_settles_at_once_and_has_no_spike():
    summary = summarize(trace(np.full(2500, 0.1)))
    assert summary["settling_step"] == 1
    assert summary["spike_score_grad_norm"] == 0.0
    assert summary["olmo_core_spike_fraction"] == 0.0
    assert summary["peak_over_median_grad_norm"] == 1.0


def test_a_norm_that_still_moves_at_the_end_has_no_settling_step():
    summary = summarize(trace(np.r_[np.ones(95), np.full(5, 9.0)]))
    assert summary["settling_step"] is None
    assert "band" in summary["undefined"]["settling_step"]


def test_settling_comes_after_the_last_stretch_outside_of_the_band():
    norm = np.ones(200)
    norm[100:120] = 5
    assert summarize(trace(norm))["settling_step"] == 121


def test_the_peak_of_means_over_100_steps_dilutes_one_step():
    norm = np.ones(250)
    norm[120] = 101
    summary = summarize(trace(norm))
    assert summary["peak_grad_norm"] == 101
    assert summary["peak_grad_norm_mean_100"] == pytest.approx(2.0)


def test_the_level_at_40_percent_is_of_the_planned_steps():
    cut_short = summarize(trace(np.ones(400)), num_steps=1000, status="diverged", reason="loss_above_init")
    assert cut_short["grad_norm_at_40_percent"] is None
    assert "step 400 of 1000" in cut_short["undefined"]["grad_norm_at_40_percent"]


def test_a_nan_in_the_middle_is_counted_and_left_out():
    norm = figure_line()
    norm[500] = np.nan
    norm[199] = np.inf  # the peak itself
    summary = summarize(trace(norm))
    assert summary["num_nonfinite_grad_norm"] == 2
    assert summary["first_nonfinite_step"] == 200
    assert summary["peak_step"] == 199
    assert summary["peak_grad_norm"] == pytest.approx(29.9)
    assert summary["end_grad_norm"] == 8
    assert summary["settling_step"] == 381


def test_norms_near_the_end_of_float32_have_a_median():
    largest = float(np.finfo(np.float32).max)
    summary = summarize(trace(np.full(20, largest)))
    assert summary["median_grad_norm"] == summary["end_grad_norm"] == largest
    assert summary["settling_step"] == 1


def test_nothing_finite_gives_no_number_but_reasons():
    summary = summarize(
        trace(np.full(50, np.nan), np.full(50, np.inf)), status="diverged", reason="nonfinite_loss"
    )
    for name in (
        "peak_grad_norm",
        "peak_step",
        "end_grad_norm",
        "initial_loss",
        "final_loss",
        "counted_loss",
    ):
        assert summary[name] is None
        assert summary["undefined"][name]
    assert summary["num_nonfinite_loss"] == 50
    assert summary["diverged_step"] == 1


def test_an_empty_trace_is_described_without_an_error():
    summary = summarize(trace([]))
    assert summary["num_steps"] == 0
    assert summary["peak_grad_norm"] is None
    json.dumps(summary, allow_nan=False)


def test_a_trace_without_its_columns_is_refused_by_name():
    with pytest.raises(ValueError, match="lacks grad_norm; columns: loss, step"):
        summarize({"step": np.arange(3), "loss": np.ones(3)})
    with pytest.raises(ValueError, match="lengths"):
        summarize(trace([1, 2]) | {"lr": np.ones(3)})


# Losses


def test_final_and_best_loss_are_means_of_hundredths():
    loss = np.r_[np.full(300, 5.0), np.tile([1.0, 3.0], 50), np.full(300, 3.0)]
    summary = summarize(trace(np.ones(700), loss))
    assert summary["initial_loss"] == 5
    assert summary["final_loss"] == 3  # mean of the last 7
    assert summary["best_loss"] == pytest.approx((4 * 1 + 3 * 3) / 7)


def test_a_loss_that_ends_in_nan_has_no_final_value():
    loss = np.r_[np.full(399, 2.0), np.nan]
    assert summarize(trace(np.ones(400), loss))["final_loss"] is None
    assert summarize(trace(np.ones(400), loss[::-1]))["final_loss"] == 2.0


def test_the_counted_loss_never_passes_the_initial_loss():
    above = summarize(trace(np.ones(10), [4, 5, 6, 7, 8, 9, 9, 9, 9, 9]))
    assert above["final_loss"] == 9
    assert above["counted_loss"] == 4
    below = summarize(trace(np.ones(3), [4, 3, 2]))
    assert below["counted_loss"] == 2


def test_a_diverged_trial_counts_as_the_initial_loss_even_with_a_low_last_loss():
    summary = summarize(trace(np.ones(3), [4, 3, 2]), status="diverged", reason="loss_scale_floor")
    assert summary["counted_loss"] == 4


def test_validation_loss_is_read_where_it_was_sampled():
    sampled = [np.nan, 3.0, np.nan, 2.0, np.nan, 2.5]
    summary = summarize(trace(np.ones(6), val_loss=sampled))
    assert (summary["best_val_loss"], summary["final_val_loss"]) == (2.0, 2.5)
    assert summarize(trace(np.ones(6)))["best_val_loss"] is None


# Spikes


def test_below_1000_values_a_spike_score_is_undefined_and_not_zero():
    summary = summarize(trace(np.ones(999)))
    assert summary["spike_score_grad_norm"] is None
    assert summary["num_spikes_grad_norm"] is None
    assert summary["undefined"]["spike_score_grad_norm"] == "needs 1,000 finite values, has 999"
    assert summarize(trace(np.ones(1000)))["spike_score_grad_norm"] == 0.0


def test_one_spike_in_a_constant_is_the_one_spike():
    norm = np.ones(3000)
    norm[1999] = 2.0
    summary = summarize(trace(norm))
    assert summary["num_spikes_grad_norm"] == 1
    assert summary["spike_steps_grad_norm"] == [2000]
    assert summary["spike_score_grad_norm"] == pytest.approx(100 / 2001)  # judged: steps 1000 to 3000


def test_the_spike_score_looks_both_ways_and_the_monitor_up_only():
    norm = np.random.default_rng(0).normal(10, 0.1, 3000)
    norm[1999], norm[2499] = 5.0, 15.0
    summary = summarize(trace(norm, np.full(3000, 3.0)))
    assert summary["spike_steps_grad_norm"] == [2000, 2500]
    assert summary["olmo_core_spike_fraction"] == pytest.approx(1 / 3000)


def test_the_monitor_counts_a_step_once_for_loss_and_norm():
    values = np.random.default_rng(0).normal(10, 0.1, 400)
    values[300] = 20
    summary = summarize(trace(values, values))
    assert summary["olmo_core_spike_fraction"] == pytest.approx(1 / 400)


def test_the_monitor_needs_its_window_and_ignores_a_flat_one():
    assert summarize(trace(np.ones(127)))["olmo_core_spike_fraction"] is None
    flat = np.ones(400)
    flat[300] = 9  # the 128 before it do not vary: by the monitor's rule that is no spike
    assert summarize(trace(flat, np.ones(400)))["olmo_core_spike_fraction"] == 0.0


def test_a_value_just_at_the_line_is_a_spike():
    # Mean 1, deviation 2, distance 4: "at least" two deviations.
    spikes, num_judged = find_spikes(np.array([0.0, 0, 0, 0, 5]), SpikeRule(5, 2.0, True, True, 0.0))
    assert (spikes.tolist(), num_judged) == ([4], 1)


def test_spikes_are_found_wherever_they_are_in_a_long_series():
    values = np.random.default_rng(0).normal(1, 0.01, 40_000).astype(np.float32)
    planted = [1500, 15_999, 16_000, 17_500, 39_999]
    values[planted] = 3
    for rule in (SPIKE_SCORE, OLMO_CORE):
        assert find_spikes(values, rule)[0].tolist() == planted


def test_a_spike_does_not_blind_the_windows_after_it():
    values = np.random.default_rng(0).normal(1, 0.01, 4000)
    values[100] = 1e30
    values[3000] = 2
    spikes, _ = find_spikes(values)
    assert spikes.tolist() == [3000]


RULES = [
    SpikeRule(8, 2.0, two_sided=True, includes_value=True, smallest_deviation=0.0),
    SpikeRule(5, 1.5, two_sided=False, includes_value=False, smallest_deviation=1e-10),
    SPIKE_SCORE,
    OLMO_CORE,
]


def spikes_one_by_one(values, rule):
    """The definition, value by value; also those so near the line that rounding may decide."""
    finite = [(i, float(x)) for i, x in enumerate(values) if math.isfinite(x)]
    found, near, judged = [], [], 0
    for place in range(rule.needs - 1, len(finite)):
        end = place + 1 if rule.includes_value else place
        window = [x for _, x in finite[end - rule.window : end]]
        mean = math.fsum(window) / len(window)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in window) / len(window))
        index, x = finite[place]
        judged += 1
        distance = abs(x - mean) if rule.two_sided else x - mean
        line = rule.deviations * deviation
        if abs(distance - line) <= 1e-6 * (abs(line) + abs(x) * 1e-6):
            near.append(index)
        elif distance > line and deviation > rule.smallest_deviation:
            found.append(index)
    return found, near, judged


series = hnp.arrays(
    np.float32,
    st.integers(0, 60),
    elements=st.one_of(
        st.floats(0.5, 2.0, width=32),
        st.sampled_from([1.0, 1.0, 1e6, 1e-6, float("nan"), float("inf"), float("-inf")]),
    ),
)


@pytest.mark.parametrize("rule", RULES[:2])
@given(values=series)
@settings(deadline=None)
def test_spikes_equal_those_found_value_by_value(rule, values):
    spikes, num_judged = find_spikes(values, rule)
    found, near, judged = spikes_one_by_one(values, rule)
    assert num_judged == judged
    assert set(found) - set(near) == set(spikes.tolist()) - set(near)


@pytest.mark.parametrize("rule", RULES[2:])
def test_spikes_of_the_published_windows_equal_those_found_value_by_value(rule):
    generator = np.random.default_rng(1)
    values = generator.lognormal(0, 0.4, 2600).astype(np.float32)
    values[generator.choice(2600, 8, replace=False)] *= 9
    values[[50, 1500]] = np.nan
    spikes, num_judged = find_spikes(values, rule)
    found, _, judged = spikes_one_by_one(values, rule)
    assert (spikes.tolist(), num_judged) == (found, judged)
    assert len(found) > 2


@given(
    values=hnp.arrays(np.float32, st.integers(1, 80), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    window=st.integers(1, 20),
)
@settings(deadline=None)
def test_rolling_mean_and_deviation_equal_the_slow_ones(values, window):
    mean, deviation = rolling_mean_deviation(values, window)
    exact = values.astype(np.float64)
    windows = [exact[i : i + window] for i in range(len(exact) - window + 1)]
    assert len(mean) == len(deviation) == max(0, len(windows))
    for i, values_of_window in enumerate(windows):
        scale = np.abs(values_of_window).max()
        assert mean[i] == pytest.approx(values_of_window.mean(), rel=1e-9, abs=1e-12 * scale)
        assert deviation[i] == pytest.approx(values_of_window.std(), rel=1e-6, abs=1e-12 * scale)


def test_rolling_works_across_the_chunks_it_is_cut_into():
    values = np.random.default_rng(2).normal(size=33_333)
    for window in (1000, 128):
        mean, deviation = rolling_mean_deviation(values, window)
        windows = np.lib.stride_tricks.sliding_window_view(values, window)[::37]
        np.testing.assert_allclose(mean[::37], windows.mean(axis=1), atol=1e-12)
        np.testing.assert_allclose(deviation[::37], windows.std(axis=1), rtol=1e-10)


# Clipping, skipping, the loss scale


def test_the_clipped_fraction_counts_norms_over_the_threshold():
    norm = [1, 2, 3, np.nan, 5, 9]
    skipped = [False, False, False, True, False, True]
    summary = summarize(trace(norm, clip_threshold=np.full(6, 2.0), skipped=skipped))
    assert summary["clipped_fraction"] == pytest.approx(2 / 4)  # of the steps taken; 2 is not over 2
    assert summary["skipped_steps"] == 2


def test_a_rule_without_a_threshold_is_seen_by_the_norm_after_it():
    nan = np.full(4, np.nan)
    summary = summarize(trace([1, 2, 3, 4], clip_threshold=nan, grad_norm_clipped=[1, 2, 2.5, 3]))
    assert summary["clipped_fraction"] == pytest.approx(0.5)


def test_without_a_record_of_clipping_there_is_no_fraction():
    summary = summarize(trace([1, 2, 3, 4]))
    assert summary["clipped_fraction"] is None
    assert summary["skipped_steps"] is None


def test_drops_of_the_loss_scale_are_counted_and_its_rises_are_not():
    scale = [8, 4, 4, 8, 2, 1]
    assert summarize(trace(np.ones(6), loss_scale=scale))["loss_scale_drops"] == 3
    fp32 = summarize(trace(np.ones(6), loss_scale=np.full(6, np.nan)))
    assert fp32["loss_scale_drops"] is None


# The end of a trial


def test_divergence_is_dated_by_its_reason():
    nan = np.nan
    loss = summarize(trace([1, 1, 1, 1], [4, 4, nan, nan]), status="diverged", reason="nonfinite_loss")
    assert loss["diverged_step"] == 3
    # The first NaN norm was got over; the trial ended in the second stretch.
    norm = summarize(trace([1, nan, 1, nan, nan]), status="diverged", reason="nonfinite_grad")
    assert norm["diverged_step"] == 4
    floor = summarize(trace([1, nan, 1]), status="diverged", reason="loss_scale_floor")
    assert (floor["diverged_step"], floor["diverged_reason"]) == (3, "loss_scale_floor")
    finished = summarize(trace([1, nan, 1]))
    assert finished["diverged_step"] is None


# Sampled columns


def test_sampled_groups_give_first_peak_last_and_a_comparison_of_depths():
    nan = np.nan
    columns = {f"grad_norm/block{i}.ffn": [1.0 + i, nan, 9.0, 2.0 + i] for i in (0, 2, 10)}
    summary = summarize(trace(np.ones(4), **columns, attn_logit_max=[nan, 3.0, 1.0, nan]))
    assert summary["first_grad_norm/block10.ffn"] == 11
    assert summary["peak_grad_norm/block0.ffn"] == 9
    assert (summary["peak_attn_logit_max"], summary["last_attn_logit_max"]) == (3, 1)
    assert summary["first_grad_norm/block_first.ffn"] == 1
    assert summary["first_grad_norm/block_last.ffn"] == 11  # by number, not by spelling
    assert summary["first_grad_norm/block_last_over_first.ffn"] == 11
    assert metric_of("first_grad_norm/block_last_over_first.ffn").unit == "1"


# Every summary, every name


traces = hnp.arrays(
    np.float32,
    st.tuples(st.just(2), st.integers(0, 40)),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(values=traces, status=st.sampled_from(["finished", "diverged", "pruned"]))
@settings(deadline=None)
def test_every_summary_is_json_and_every_name_in_it_is_defined(values, status):
    summary = summarize(trace(values[0], values[1]), status=status, reason="nonfinite_grad")
    json.dumps(summary, allow_nan=False)
    assert set(summary) == {*METRICS, "undefined"}
    assert set(summary["undefined"]) == {name for name in METRICS if summary[name] is None}


def test_what_is_in_the_table_has_a_definition_and_a_direction():
    for name, metric in METRICS.items():
        assert metric.definition, name
        assert metric.better in ("lower", "higher", None), name
    for column in SAMPLED:
        assert metric_of(f"peak_{column}x" if column.endswith("/") else f"peak_{column}").unit


def test_an_unknown_metric_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown metric 'peak_gradnorm', did you mean 'peak_grad_norm'\?"):
        metric_of("peak_gradnorm")
    with pytest.raises(ValueError, match="unknown metric 'last_grad_norm'"):
        metric_of("last_grad_norm")


# Functions of several runs


def test_lr_sensitivity_by_hand():
    # l* = 2; the others are 1 and, clamped at the initial loss 4, 2 above it.
    assert lr_sensitivity([1e-3, 1e-2, 1e-1], [2.0, 3.0, 9.0], 4.0) == pytest.approx(1.0)
    assert lr_sensitivity([1e-3, 1e-2, 1e-1], [2.0, 3.0, np.nan], 4.0) == pytest.approx(1.0)


def test_lr_sensitivity_is_zero_if_all_diverge_and_undefined_for_one_rate():
    assert lr_sensitivity([1e-3, 1e-2], [np.nan, np.inf], 4.0) == 0.0
    assert lr_sensitivity([1e-3, 1e-3], [2.0, 3.0], 4.0) is None


def test_lr_sensitivity_weighs_rates_and_not_runs():
    assert lr_sensitivity([1e-3, 1e-3, 1e-2], [2.0, 2.0, 3.0], 4.0) == pytest.approx(0.5)


@given(
    losses=st.lists(st.floats(0, 20) | st.just(float("nan")), min_size=2, max_size=7),
    initial=st.floats(0.1, 10),
)
def test_lr_sensitivity_is_between_zero_and_the_initial_loss(losses, initial):
    value = lr_sensitivity(np.arange(1, len(losses) + 1), losses, initial)
    assert 0 <= value <= initial


def test_model_update_is_the_length_of_the_mean_displacement_and_ignores_the_batch_size():
    before = np.zeros((2, 3, 4))
    after = before.copy()
    after[..., :2] = [3.0, 4.0]
    assert model_update(before, after) == pytest.approx(5.0)
    assert model_update(np.tile(before, (5, 1, 1)), np.tile(after, (5, 1, 1))) == pytest.approx(5.0)


def test_update_to_weight_is_a_ratio_and_undefined_for_no_weight():
    ratio = update_to_weight([0.1, 0.1], [100.0, 0.0])
    assert ratio[0] == pytest.approx(1e-3)
    assert math.isnan(ratio[1])


def test_gradient_noise_scale_recovers_a_planted_one():
    # Gradients G + noise / sqrt(batch) with |G|^2 = 4 and tr(S) = 100 x 0.36: B_simple = 9.
    generator = np.random.default_rng(0)
    true = np.full(100, 0.2)

    def norms(batch):
        noise = generator.normal(0, 0.6, (4000, 100)) / math.sqrt(batch)
        return np.linalg.norm(true + noise, axis=1)

    assert gradient_noise_scale(norms(2), norms(32), 2, 32) == pytest.approx(9.0, rel=0.05)


def test_gradient_noise_scale_without_a_signal_is_undefined():
    assert gradient_noise_scale(np.array([2.0]), np.array([0.5]), 1, 2) is None
    with pytest.raises(ValueError, match="batches 8 and 4"):
        gradient_noise_scale(np.ones(2), np.ones(2), 8, 4)

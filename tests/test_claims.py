"""Claims: what a study file may say, which arms are meant, and the verdicts on planted results."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from study.claims import Claim, check, evaluate, flatten, parse
from study.selectors import differing, no_op_fields, resolve, same, select, within

NO_OP = "pb_relax (alpha 32) equals none in exact arithmetic; scores are stored in float32"


def arm(label, config, summaries, *, no_ops=(), statuses=None):
    """An arm whose trials have these summaries, one a seed."""
    statuses = statuses or ["finished"] * len(summaries)
    trials = [
        {"seed": seed, "status": status, "reason": None, "no_ops": list(no_ops), "summary": summary}
        for seed, (status, summary) in enumerate(zip(statuses, summaries, strict=True))
    ]
    fields = flatten({"precision": "fp32", "seed": 0, **config})
    return {"label": label, "fields": fields, "trials": trials}


def peaks(*values):
    return [{"peak_grad_norm": value, "undefined": {}} for value in values]


def block(name, *values, **more):
    config = {"model": {"block": {"name": name}, "relaxation": {"name": "none"}}, "clip": {"max_norm": 1.0}}
    return arm(name, config, peaks(*values), **more)


def relaxed(*values, no_ops=(NO_OP,), precision="fp32"):
    relaxation = {"name": "pb_relax", "alpha": 32}
    model = {"block": {"name": "pre"}, "relaxation": relaxation}
    config = {"model": model, "clip": {"max_norm": 1.0}, "precision": precision}
    return arm("relaxed", config, peaks(*values), no_ops=no_ops)


CALMER = {
    "id": "deepnorm-calmest",
    "say": "DeepNorm keeps the lowest gradient norm",
    "metric": "peak_grad_norm",
    "lower": {"block": "deepnorm"},
    "than": {"block": "pre"},
    "source": "the figure",
}


def one(claim, *arms):
    (verdict,) = evaluate([claim], list(arms))
    json.dumps(verdict.to_dict(), allow_nan=False)
    return verdict


# What a study file may say


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "peak_gradnorm"}, "did you mean 'peak_grad_norm'"),
        ({"metric": "spike_steps_loss"}, "is not a number"),
        ({"metric": None}, "'lower' needs a metric"),
        ({"than": None}, "'lower' needs 'than'"),
        ({"higher": {"block": "pre"}}, "needs one of .*; has lower, higher"),
        ({"lower": None}, "needs one of .*; has none"),
        ({"tolerance": 0.1}, "'equal' needs a tolerance, and nothing else"),
        ({"lower": None, "equal": {"block": "pre"}}, "'equal' needs a tolerance"),
        ({"lower": None, "diverges": {"block": "pre"}}, "'diverges' takes no 'than'"),
        ({"lower": None, "than": None, "diverges": {"block": "pre"}}, "'diverges' takes no metric"),
        ({"lowest": 1}, r"extra inputs are not permitted \(lowest\)"),
        ({"id": "No Spaces"}, r"\(id\)"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused_by_its_name(change, message):
    claim = CALMER | change
    with pytest.raises(ValueError, match=f"(?i)claim '{claim['id']}': .*{message}"):
        parse([claim])


def test_claims_have_unlike_ids():
    with pytest.raises(ValueError, match="claim 'deepnorm-calmest': there are several"):
        parse([CALMER, CALMER])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"than": {"block": "post"}}, r"no arm fits \{block: post\}; arms: deepnorm; pre"),
        ({"lower": {"blok": "deepnorm"}}, "unknown field 'blok'; known: clip.max_norm, label, model.block"),
        ({"than": {"block": "deepnorm"}}, r"\{block: deepnorm\} selects no arm but those"),
        ({"where": {"max_norm": 10}}, r"no arm fits \{max_norm: 10\}"),
    ],
)
def test_a_claim_about_an_arm_that_the_run_lacks_is_an_input_error(change, message):
    arms = [block("deepnorm"), block("pre")]  # before any trial is run
    with pytest.raises(ValueError, match=f"claim 'deepnorm-calmest': {message}"):
        check([CALMER | change], arms)
    assert check([CALMER], arms)[0].relation == "lower"


# Which arms are meant


def test_a_config_is_flattened_with_variants_under_their_own_key():
    config = {
        "model": {"relaxation": {"name": "pb_relax", "alpha": 32}, "d_model": 48},
        "optimizer": {"name": "adamw", "betas": [0.9, 0.95]},
        "steps": 60,
    }
    assert flatten(config) == {
        "model.relaxation": "pb_relax",
        "model.relaxation.alpha": 32,
        "model.d_model": 48,
        "optimizer": "adamw",
        "optimizer.betas": "[0.9, 0.95]",
        "steps": 60,
    }


def test_settings_are_the_same_as_numbers_or_as_text():
    assert same(10, 10.0) and same("1e-3", 0.001) and same(True, "true") and same(None, "none")
    assert not same(1, True) and not same("pre", "pre2") and not same(1, 1.5)


def test_a_field_is_meant_by_its_last_components():
    known = {"model.block", "model.relaxation.alpha", "steps", "schedule.steps", "clip.eps", "optimizer.eps"}
    assert resolve("block", known) == "model.block"
    assert resolve("relaxation.alpha", known) == "model.relaxation.alpha"
    assert resolve("steps", known) == "steps"  # the whole name goes first
    with pytest.raises(ValueError, match="'eps' is ambiguous; it could be: clip.eps, optimizer.eps"):
        resolve("eps", known)
    with pytest.raises(ValueError, match="unknown field 'lock'"):
        resolve("lock", known)


def test_a_selector_may_name_a_variant_with_its_options_or_a_label():
    arms = [block("pre"), relaxed()]
    assert [a["label"] for a in select({"relaxation": {"name": "pb_relax", "alpha": 32}}, arms)] == [
        "relaxed"
    ]
    assert [a["label"] for a in select({"label": "pre"}, arms)] == ["pre"]
    assert len(select({"block": "pre"}, arms)) == 2
    assert len(select({}, arms)) == 2


def test_arms_differ_in_fields_and_not_in_seeds():
    assert differing(block("pre"), relaxed()) == {"model.relaxation", "model.relaxation.alpha"}
    later = {**block("pre"), "fields": {**block("pre")["fields"], "seed": 7}}
    assert differing(block("pre"), later) == set()
    with pytest.raises(ValueError, match="unknown field 'seed'"):
        select({"seed": 0}, [block("pre")])
    assert within(["model.relaxation.alpha"], ["model.relaxation"])
    assert not within(["model.relaxations"], ["model.relaxation"])


def test_a_no_op_is_named_by_sentence_or_by_field():
    assert no_op_fields(relaxed(1.0)) == {"model.relaxation"}
    assert no_op_fields(relaxed(1.0, no_ops=["relaxation"])) == {"model.relaxation"}
    assert no_op_fields(relaxed(1.0, no_ops=[])) == set()
    assert no_op_fields(relaxed()) == set()  # no trial, no word
    mixed = relaxed(1.0, 2.0)
    mixed["trials"][1]["no_ops"] = []
    assert no_op_fields(mixed) == set()


# lower, higher


def test_a_clear_difference_is_supported_or_contradicted_with_its_numbers():
    calm, wild = block("deepnorm", 1.0, 2.1, 4.2), block("pre", 3.0, 6.0, 12.0)
    verdict = one(CALMER, calm, wild)
    expected = stats.ttest_rel(np.log([1.0, 2.1, 4.2]), np.log([3.0, 6.0, 12.0]))
    assert verdict.verdict == "supported"
    assert verdict.kind == "ratio"
    assert verdict.value == pytest.approx((1 * 2.1 * 4.2 / 216) ** (1 / 3))
    assert verdict.p == verdict.adjusted_p == pytest.approx(expected.pvalue)
    assert verdict.n == 3
    assert verdict.left == ["deepnorm"] and verdict.right == ["pre"]
    turned = {**CALMER, "lower": {"block": "pre"}, "than": {"block": "deepnorm"}}
    assert one(turned, calm, wild).verdict == "contradicted"
    higher = {**turned, "higher": turned["lower"]}
    del higher["lower"]
    assert one(higher, calm, wild).verdict == "supported"


def test_too_few_seeds_are_undecided_and_say_how_many_would_do():
    verdict = one(CALMER, block("deepnorm", 1.0, 5.0, 2.0), block("pre", 2.0, 4.5, 5.0))
    assert verdict.verdict == "undecided"
    assert verdict.needed > 3
    assert verdict.reason.startswith(f"undecided with 3 seeds; about {verdict.needed} would be needed")


def test_one_seed_decides_nothing_however_large_the_difference():
    verdict = one(CALMER, block("deepnorm", 1.0), block("pre", 1000.0))
    assert (verdict.verdict, verdict.n) == ("undecided", 1)
    assert verdict.reason.startswith("undecided with 1 seed")


def test_relaxation_in_fp32_is_identical_by_construction_and_so_not_testable():
    claim = {**CALMER, "lower": {"relaxation": "pb_relax"}, "than": {"relaxation": "none"}}
    verdict = one(claim, relaxed(1.0, 2.0, 3.0), block("pre", 9.0, 9.5, 9.9))
    assert verdict.verdict == "not_testable"
    assert verdict.reason == "identical by construction in fp32"
    # Where it does something, the same numbers are put to the test.
    assert (
        one(claim, relaxed(1.0, 2.0, 3.0, no_ops=[]), block("pre", 9.0, 9.5, 9.9)).verdict != "not_testable"
    )


def test_arms_that_differ_in_more_than_a_no_op_are_put_to_the_test():
    claim = {**CALMER, "lower": {"relaxation": "pb_relax"}, "than": {"relaxation": "none"}}
    other = arm(
        "post",
        {"model": {"block": "post", "relaxation": "none"}, "clip": {"max_norm": 1.0}},
        peaks(9, 9.5, 9.9),
    )
    assert one(claim, relaxed(1.0, 1.05, 1.1), other).verdict == "supported"


def test_the_same_norm_in_every_pair_contradicts_and_the_same_count_tells_nothing():
    verdict = one(CALMER, block("deepnorm", 1.0, 2.0), block("pre", 1.0, 2.0))
    assert verdict.verdict == "contradicted"
    assert verdict.reason == "the same value in every one of 2 pairs"
    skipped = [{"skipped_steps": 0, "undefined": {}}] * 2
    arms = [arm("a", {"block": "deepnorm"}, skipped), arm("b", {"block": "pre"}, skipped)]
    assert one({**CALMER, "metric": "skipped_steps"}, *arms).verdict == "undecided"


def test_a_metric_without_a_value_is_not_testable_and_says_why():
    why = "needs 1,000 finite values, has 240"
    summaries = [{"spike_score_loss": None, "undefined": {"spike_score_loss": why}}] * 3
    arms = [arm("a", {"block": "deepnorm"}, summaries), arm("b", {"block": "pre"}, summaries)]
    verdict = one({**CALMER, "metric": "spike_score_loss"}, *arms)
    assert verdict.verdict == "not_testable"
    assert why in verdict.reason


def test_pruned_trials_say_nothing_and_no_trials_neither():
    pruned = block("deepnorm", 1.0, 1.0, statuses=["pruned", "pruned"])
    verdict = one(CALMER, pruned, block("pre", 2.0, 2.0))
    assert verdict.verdict == "not_testable"
    assert "pruned" in verdict.reason
    assert "no trial has ended" in one(CALMER, block("deepnorm"), block("pre")).reason


def test_a_diverged_trial_counts_with_its_initial_loss():
    def losses(name, ends, statuses):
        summaries = [{"final_loss": end, "initial_loss": 4.0, "undefined": {}} for end in ends]
        return arm(name, {"block": name}, summaries, statuses=statuses)

    calm = losses("deepnorm", [2.0, 2.1, 2.2, 2.1], ["finished"] * 4)
    dead = losses("pre", [None, None, 1.0, None], ["diverged"] * 4)  # nor does a low loss save it
    verdict = one({**CALMER, "metric": "final_loss"}, calm, dead)
    assert verdict.verdict == "supported"
    assert verdict.right_mean == 4.0
    assert verdict.num_diverged == 4


def test_a_number_may_be_what_is_compared_with():
    claim = {**CALMER, "than": 10.0}
    verdict = one(claim, block("deepnorm", 1.0, 1.1, 1.2), block("pre", 99.0, 98.0, 97.0))
    assert verdict.verdict == "supported"
    assert verdict.value == pytest.approx((1.0 * 1.1 * 1.2) ** (1 / 3) / 10)
    assert (verdict.left, verdict.right) == (["deepnorm"], [])


def test_arms_are_paired_with_those_that_differ_only_in_what_is_claimed():
    def at(name, layers, *values):
        return arm(f"{name}{layers}", {"model": {"block": name, "num_layers": layers}}, peaks(*values))

    # Each depth has a level of its own; the arm at 24 layers has no partner and must not count.
    arms = [
        at("pre", 2, 2, 2.2),
        at("pre", 6, 200, 220),
        at("deepnorm", 2, 1, 1.1),
        at("deepnorm", 6, 100, 110),
    ]
    verdict = one(CALMER, *arms, at("deepnorm", 24, 9000, 9900))
    assert verdict.value == pytest.approx(0.5)
    assert verdict.n == 2  # seeds, not pairs of arms
    assert one({**CALMER, "where": {"num_layers": 2}}, *arms).left == ["deepnorm2"]


def test_only_seeds_that_both_sides_have_are_compared():
    short = block("pre", 2.0, 2.2, 2.1, 500.0, statuses=["finished"] * 3 + ["failed"])
    verdict = one(CALMER, block("deepnorm", 1.0, 1.1, 1.0, 900.0), short)
    assert (verdict.verdict, verdict.n) == ("supported", 3)
    assert verdict.left_mean == pytest.approx(3.1 / 3)


def test_many_claims_are_corrected_for():
    left, right = block("deepnorm", 1.0, 2.0, 3.0, 4.0), block("pre", 1.5, 2.5, 5.0, 5.0)
    alone = one(CALMER, left, right)
    assert alone.verdict == "supported"
    assert 0.01 < alone.p < 0.05
    many = evaluate([CALMER, *({**CALMER, "id": f"again-{i}"} for i in range(5))], [left, right])
    assert [v.verdict for v in many] == ["undecided"] * 6
    assert many[0].adjusted_p == pytest.approx(6 * alone.p)
    assert "6 claims" in many[0].reason or "needed" in many[0].reason


# equal


EQUAL = {**CALMER, "id": "same", "equal": {"block": "deepnorm"}, "tolerance": 0.1}
del EQUAL["lower"]


def test_equal_is_supported_only_if_the_whole_interval_is_within_the_tolerance():
    close = block("deepnorm", 1.00, 2.02, 3.00, 4.02), block("pre", 1.01, 2.00, 3.03, 4.00)
    assert one(EQUAL, *close).verdict == "supported"
    far = block("deepnorm", 1.0, 2.0, 3.0), block("pre", 2.0, 4.0, 6.1)
    assert one(EQUAL, *far).verdict == "contradicted"
    noisy = block("deepnorm", 1.0, 2.5, 3.0), block("pre", 1.2, 2.0, 3.0)
    verdict = one(EQUAL, *noisy)
    assert verdict.verdict == "undecided"
    assert verdict.needed > 3


def test_equal_arms_that_can_not_differ_say_so():
    claim = {**EQUAL, "equal": {"relaxation": "pb_relax"}, "than": {"relaxation": "none"}}
    verdict = one(claim, relaxed(1.0, 2.0), block("pre", 1.0, 2.0))
    assert verdict.verdict == "supported"
    assert verdict.reason.endswith("identical by construction")


def test_equal_counts_of_zero_are_equal():
    zero = [{"skipped_steps": 0, "undefined": {}}] * 3
    arms = [arm("a", {"block": "deepnorm"}, zero), arm("b", {"block": "pre"}, zero)]
    assert one({**EQUAL, "metric": "skipped_steps"}, *arms).verdict == "supported"


# diverges, converges


def mortal(num_dead, num_alive):
    statuses = ["diverged"] * num_dead + ["finished"] * num_alive + ["pruned"]
    return arm("plain", {"relaxation": "none"}, [{"undefined": {}}] * len(statuses), statuses=statuses)


@pytest.mark.parametrize(
    ("dead", "alive", "diverges", "converges"),
    [
        (5, 0, "supported", "contradicted"),
        (0, 5, "contradicted", "supported"),
        (3, 0, "undecided", "undecided"),
        (3, 2, "undecided", "undecided"),
        (0, 0, "not_testable", "not_testable"),
    ],
)
def test_divergence_is_decided_by_wilsons_interval(dead, alive, diverges, converges):
    for relation, expected in (("diverges", diverges), ("converges", converges)):
        claim = {"id": "dies", "say": "plain scores overflow", relation: {"relaxation": "none"}}
        verdict = one(claim, mortal(dead, alive))
        assert verdict.verdict == expected
        assert verdict.n == dead + alive
    if dead == 3 and alive == 0:
        assert "undecided with 3 trials; about 4 would be needed" in verdict.reason


# scales_as


def depths(slope, num_seeds, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    arms = []
    for layers in (2, 4, 8, 16):
        values = 3.0 * layers**slope * np.exp(generator.normal(0, noise, num_seeds))
        arms.append(arm(f"{layers} layers", {"model": {"num_layers": layers}}, peaks(*values)))
    return arms


SCALING = {
    "id": "depth",
    "say": "falls as 1 / sqrt(layers)",
    "metric": "peak_grad_norm",
    "scales_as": {"over": "num_layers", "slope": -0.5, "tolerance": 0.1},
}


def test_a_power_law_is_recovered_from_planted_ones():
    verdict = one(SCALING, *depths(-0.5, 3))
    assert verdict.verdict == "supported"
    assert verdict.value == pytest.approx(-0.5)
    assert one(SCALING, *depths(-0.5, 5, noise=0.05)).verdict == "supported"
    assert one(SCALING, *depths(0.0, 5, noise=0.05)).verdict == "contradicted"
    assert one(SCALING, *depths(-1.0, 5, noise=0.05)).verdict == "contradicted"
    assert one(SCALING, *depths(-0.5, 3, noise=0.8)).verdict == "undecided"
    assert one(SCALING, *depths(-0.5, 1)).verdict == "undecided"


def test_a_seed_without_a_positive_value_at_every_size_gives_no_slope():
    arms = depths(-0.5, 4)
    arms[1]["trials"][0]["status"] = "failed"
    arms[2]["trials"][1]["summary"]["peak_grad_norm"] = 0.0
    verdict = one(SCALING, *arms)
    assert (verdict.verdict, verdict.n) == ("supported", 2)
    assert "no seed has a positive" in one(SCALING, *depths(-0.5, 0)).reason


def test_a_slope_needs_sizes():
    none = arm("0 layers", {"model": {"num_layers": 0}}, peaks(1.0))
    with pytest.raises(ValueError, match="needs positive numbers; 'model.num_layers' is 0 in 0 layers"):
        check([SCALING], [none, *depths(0, 1)])
    with pytest.raises(ValueError, match="claim 'depth': 'model.num_layers' is the same in every arm"):
        check([SCALING], depths(0, 1)[:1])
    with pytest.raises(ValueError, match="needs positive numbers; 'model.block' is pre"):
        check([{**SCALING, "scales_as": {"over": "block", "slope": 1}}], [block("pre"), block("post")])


# Planted truth


def planted(effect, num_runs, num_seeds, seed=0):
    """Runs of three arms: `pre`, and two whose log norm lies `effect` above it."""
    generator = np.random.default_rng(seed)
    for _ in range(num_runs):
        level = generator.normal(2, 0.5, num_seeds)
        logs = [level + shift + generator.normal(0, 0.3, num_seeds) for shift in (0.0, effect, effect)]
        yield [block(n, *np.exp(log)) for n, log in zip(["pre", "deepnorm", "post"], logs, strict=True)]


CLAIMS = [Claim(**CALMER), Claim(**{**CALMER, "id": "post", "lower": {"block": "post"}})]


def test_equal_arms_get_a_verdict_at_most_one_time_in_twenty():
    verdicts = [verdict.verdict for arms in planted(0.0, 400, 5) for verdict in evaluate(CLAIMS, arms)]
    assert np.mean([verdict != "undecided" for verdict in verdicts]) <= 0.05
    assert verdicts.count("supported") > 0  # it is rare, not impossible


def test_a_planted_effect_is_found_and_its_interval_holds_it():
    verdicts = [v for arms in planted(math.log(0.5), 200, 5) for v in evaluate(CLAIMS, arms)]
    assert np.mean([v.verdict == "supported" for v in verdicts]) > 0.6
    assert not any(v.verdict == "contradicted" for v in verdicts)
    assert 0.93 <= np.mean([v.low <= 0.5 <= v.high for v in verdicts]) <= 0.97


def test_the_number_of_seeds_that_is_asked_for_is_enough_most_times():
    asked = [evaluate(CLAIMS[:1], arms)[0].needed for arms in planted(math.log(0.7), 200, 4)]
    typical = int(np.median([needed for needed in asked if needed is not None]))
    found = [evaluate(CLAIMS[:1], arms)[0].verdict for arms in planted(math.log(0.7), 200, typical, seed=1)]
    assert np.mean([verdict == "supported" for verdict in found]) > 0.65

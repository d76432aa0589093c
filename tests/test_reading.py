"""The reading: its sentences say what the numbers say, and nothing that isn't among them."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from study.claims import flatten
from study.glossary import say, sentence
from study.limits import LIMITS
from study.metrics import summarize
from study.reading import read, to_markdown

NO_OP = "pb_relax (alpha 32) equals none in exact arithmetic; scores are stored in float32"
BASE = {
    "model": {"block": "pre", "relaxation": "none"},
    "clip": {"name": "global_norm", "max_norm": 1.0},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "precision": "fp32",
    "steps": 1200,
    "seed": 0,
}


def norms(start, peak, end, seed, num_steps=1200):
    """A line of the figure: up to its peak at a fifth, down to its end at two fifths, some noise."""
    generator = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1)
    line = np.interp(steps, [0, 0.2 * num_steps, 0.4 * num_steps, num_steps], [start, peak, end, end])
    line = line * generator.lognormal(0, 0.02, num_steps)
    line[num_steps // 5 - 1] = peak * 1.1 * generator.lognormal(0, 0.05)
    return line


def trial(seed, line=(10, 30, 8), *, status="finished", reason=None, no_ops=(), clip=1.0, num_steps=1200):
    norm = norms(*line, seed, num_steps)
    columns = {
        "step": np.arange(1, num_steps + 1, dtype=np.int32),
        "grad_norm": norm.astype(np.float32),
        "loss": np.linspace(4, 2 + 0.01 * seed, num_steps, dtype=np.float32),
        "clip_threshold": np.full(num_steps, clip, np.float32),
        "skipped": np.zeros(num_steps, bool),
    }
    summary = summarize(columns, status=status, reason=reason, num_steps=num_steps)
    found = {"seed": seed, "status": status, "reason": reason, "no_ops": list(no_ops), "summary": summary}
    return found if status in ("finished", "diverged") else {**found, "summary": None}


def arm(label, trials, **changes):
    return {"label": label, "fields": {**flatten(BASE), **changes}, "trials": trials}


def figure():
    """The four lines, five seeds."""

    def seeds(line, **options):
        return [trial(seed, line, **options) for seed in range(5)]

    relaxation = {"model.relaxation": "pb_relax", "model.relaxation.alpha": 32}
    return [
        arm("Pre-Norm | Gradient Clip=10", seeds((10, 30, 8), clip=10.0), **{"clip.max_norm": 10.0}),
        arm("Pre-Norm | Gradient Clip=1", seeds((10, 20, 12))),
        arm("DeepNorm", seeds((1, 3, 1)), **{"model.block": "deepnorm"}),
        arm("Attn. Relax", seeds((10, 25, 13), no_ops=[NO_OP]), **relaxation),
    ]


CLAIMS = [
    {
        "id": "deepnorm-calmest",
        "say": "DeepNorm keeps the lowest gradient norm",
        "metric": "peak_grad_norm",
        "lower": {"block": "deepnorm"},
        "than": {"label": "Pre-Norm | Gradient Clip=1"},
        "source": "the figure",
    },
    {
        "id": "relaxation-lowers",
        "say": "relaxation lowers the norm",
        "metric": "peak_grad_norm",
        "lower": {"relaxation": "pb_relax"},
        "than": {"label": "Pre-Norm | Gradient Clip=1"},
    },
]


def run(claims=(), **search):
    config = {"claims": list(claims), "search": {"algorithm": "grid", "scheduler": "none", **search}}
    return {"id": "figure-1", "study": "figure", "status": "finished", "config": config, "notes": []}


def kinds(reading):
    return [limit["kind"] for limit in reading["cannot_tell"]]


# Text and numbers together

QUOTED = ("label", "left", "right", "arms", "arm", "say", "source", "notes", "because", "run", "study")


def leaves(value, key=""):
    """Every (key, leaf) of nested JSON; items of a list have the list's key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, name if not isinstance(inner, str) or key != "undefined" else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, key)
    else:
        yield key, value


def numbers_without_a_source(reading):
    """Numbers in the Markdown that are no number of the JSON, once names and quotes are taken out."""
    text = to_markdown(reading)
    found = list(leaves(reading))
    quotes = {
        leaf for key, leaf in found if isinstance(leaf, str) and key in (*QUOTED, "undefined", "metric")
    }
    for quote in sorted(quotes - {""}, key=len, reverse=True):
        text = text.replace(quote, "").replace(quote.replace("|", "\\|"), "")
    text = re.sub(r"(?m)^\d+\. ", "", text)
    known = {say(leaf) for _, leaf in found if isinstance(leaf, int | float) and not isinstance(leaf, bool)}
    written = re.findall(r"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?", text)  # but fp32
    return [number for number in written if number.rstrip(",") not in known]


def test_every_number_in_the_text_is_in_the_json():
    reading = read(run(CLAIMS), figure())
    json.dumps(reading, allow_nan=False)
    assert numbers_without_a_source(reading) == []
    assert len(re.findall(r"\d", to_markdown(reading))) > 200  # there is something to hold together


def test_a_number_that_is_not_in_the_json_would_be_noticed():
    reading = read(run(CLAIMS), figure())
    reading["lines"][0]["text"] += ", or 77.7"
    assert numbers_without_a_source(reading) == ["77.7"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.0, "0"),
        (20_000, "20,000"),
        (30.0, "30"),
        (13.94, "13.9"),
        (0.01234, "0.0123"),
        (1234.56, "1,235"),
        (-0.5, "-0.500"),
        (1.234e-5, "1.23e-05"),
        (9.99e7, "9.99e+07"),
        (0.9996, "1.000"),
    ],
)
def test_numbers_are_written_with_their_sensible_digits(value, text):
    assert say(value) == text


def test_a_sentence_keeps_the_numbers_it_is_made_of():
    assert sentence("{a} of '{b}'", a=0.12345, b="x 9") == {
        "text": "0.123 of 'x 9'",
        "numbers": {"a": 0.12345},
    }


# Lines


def test_a_line_is_read_as_the_figure_was():
    line = read(run(), figure())["lines"][0]
    numbers = line["numbers"]
    assert line["arm"] == "Pre-Norm | Gradient Clip=10"
    assert numbers["start"] == pytest.approx(10, rel=0.1)
    assert numbers["peak"] == pytest.approx(33, rel=0.1)
    assert numbers["peak_step"] == 240
    assert numbers["later_step"] == 480
    assert numbers["later"] == pytest.approx(8, rel=0.1)
    assert numbers["end"] == pytest.approx(8, rel=0.1)
    text = f"starts at {say(numbers['start'])}, peaks at {say(numbers['peak'])} at step 240, falls to "
    assert line["text"].startswith(text + f"{say(numbers['later'])} by step 480, ends at ")


def test_a_constant_line_does_not_fall():
    flat = trial(0)
    flat["summary"] |= {"peak_grad_norm": 2.0, "grad_norm_at_40_percent": 2.0, "peak_step": 1}
    assert "is at 2 at step 480" in read(run(), [arm("flat", [flat])])["lines"][0]["text"]


def test_a_line_that_rises_to_its_end_does_not_fall():
    late = arm("late", [trial(0, (1, 1, 50))])
    late["trials"][0]["summary"] |= {"peak_step": 1100, "peak_grad_norm": 60.0}
    text = read(run(), [late])["lines"][0]["text"]
    assert "falls" not in text
    assert "at step 480" in text


def test_diverged_trials_are_named_in_their_line_and_first_among_the_observations():
    trials = [trial(s, status="diverged", reason="nonfinite_loss") for s in range(2)] + [trial(2)]
    reading = read(run(), [*figure(), arm("wild", trials, **{"model.block": "post"})])
    assert reading["lines"][4]["text"].endswith("2 of 3 trials diverged")
    first = reading["observations"][0]
    assert first["text"].startswith("'wild': 2 of 3 trials diverged (nonfinite_loss;")
    wild = reading["arms"][4]
    assert (wild["num_diverged"], wild["diverged_seeds"], wild["reasons"]) == (
        2,
        [0, 1],
        {"nonfinite_loss": 2},
    )
    assert wild["metrics"]["final_loss"]["mean"] == pytest.approx((4 + 4 + 2.03) / 3, abs=0.01)
    assert "diverged_norms" in kinds(reading)


# What stands out


def test_observations_come_in_order_of_size_and_deepnorms_is_the_largest():
    reading = read(run(), figure())
    told = [entry for entry in reading["comparisons"] if entry["told"]]
    largest = max(told, key=lambda entry: entry["size"])
    assert largest["left"] == "DeepNorm"
    text = reading["observations"][0]["text"]
    assert text.startswith("'DeepNorm' has a ")
    assert " times lower than that of 'Pre-Norm | Gradient Clip=10'" in text
    numbers = reading["observations"][0]["numbers"]
    assert numbers["value"] == pytest.approx(1 / largest["ratio"])
    values = [o["numbers"]["value"] for o in reading["observations"] if " times " in o["text"]]
    assert values == sorted(values, reverse=True)
    assert len(values) > 2


def test_a_lower_norm_is_said_as_a_factor_with_its_interval_the_right_way_round():
    high, low = (arm("high", [trial(seed) for seed in range(4)]), figure()[2])
    for seed, entry in enumerate(high["trials"]):
        low["trials"][seed]["summary"]["peak_grad_norm"] = entry["summary"]["peak_grad_norm"] / (20 + seed)
    entry = next(e for e in read(run(), [high, low])["comparisons"] if e["metric"] == "peak_grad_norm")
    found = read(run(), [high, low])["observations"][0]["numbers"]
    assert found["value"] == pytest.approx(1 / entry["ratio"])
    assert found["low"] == pytest.approx(1 / entry["ratio_high"])
    assert found["high"] == pytest.approx(1 / entry["ratio_low"])
    assert 18 < found["low"] < found["value"] < found["high"] < 25


def test_a_higher_loss_is_said_as_a_difference_with_its_interval_the_right_way_round():
    low = arm("low", [trial(seed) for seed in range(4)])
    high = arm("high", [trial(seed) for seed in range(4)], **{"model.block": "post"})
    for seed, entry in enumerate(high["trials"]):
        entry["summary"]["final_loss"] = low["trials"][seed]["summary"]["final_loss"] + 0.5 + 0.01 * seed
    for arms, way in (([low, high], "higher"), ([high, low], "lower")):
        (found,) = [o for o in read(run(), arms)["observations"] if "has a final loss" in o["text"]]
        assert f"0.515 {way} than" in found["text"]
        numbers = found["numbers"]
        assert 0 < numbers["low"] < numbers["value"] < numbers["high"]


def test_arms_that_can_not_be_told_apart_are_counted_with_the_seeds_it_would_take():
    arms = [
        arm("a", [trial(s) for s in range(3)]),
        arm("b", [trial(s + 50) for s in range(3)], **{"steps": 1201}),
    ]
    for place, entry in enumerate(arms[1]["trials"]):
        entry["seed"] = place
    found = [o for o in read(run(), arms)["observations"] if "undecided" in o["text"]]
    assert len(found) == 1
    assert found[0]["numbers"]["needed"] > 3


def test_identical_arms_are_not_compared():
    arms = figure()[1:]
    reading = read(run(), arms)
    assert {entry["left"] for entry in reading["comparisons"]} == {"DeepNorm"}


# Verdicts


def test_relaxation_in_fp32_is_not_testable_and_the_report_says_why():
    reading = read(run(CLAIMS), figure())
    calmest, relaxed = reading["verdicts"]
    assert calmest["verdict"] == "supported"
    assert (relaxed["verdict"], relaxed["reason"]) == ("not_testable", "identical by construction in fp32")
    (limit,) = [limit for limit in reading["cannot_tell"] if limit["kind"] == "identical_arms"]
    assert limit["arms"] == ["Pre-Norm | Gradient Clip=1", "Attn. Relax"]
    assert limit["because"] == [NO_OP]
    markdown = to_markdown(reading)
    assert "| relaxation lowers the norm | not testable | identical by construction in fp32 |" in markdown
    assert "are identical by construction in fp32" in markdown


def test_a_claim_about_no_arm_leaves_the_others_their_verdict():
    lost = {**CLAIMS[0], "id": "lost", "than": {"block": "sandwich"}}
    reading = read(run([lost, {"id": "nonsense"}, CLAIMS[0]]), figure())
    assert [v["verdict"] for v in reading["verdicts"]] == ["not_testable", "not_testable", "supported"]
    assert "claim 'lost': no arm fits {block: sandwich}" in reading["verdicts"][0]["reason"]


# What this run can't tell


def test_a_clean_run_of_enough_seeds_has_nothing_to_confess():
    arms = [figure()[0], figure()[2]]
    assert read(run(), arms)["cannot_tell"] == []


def test_few_seeds_are_confessed():
    one = read(run(), [arm("a", [trial(0)])])
    assert one["cannot_tell"][0]["text"].startswith("An arm of 1 seed is an anecdote")
    few = read(run(), [arm("a", [trial(0), trial(1), trial(2)])])
    assert few["cannot_tell"][0]["text"].startswith("With 3 seeds in an arm")


@pytest.mark.parametrize(
    ("clip", "words"), [(1e9, "neither threshold"), (1e-9, "under Adam"), (12.0, "little")]
)
def test_equal_clipped_fractions_are_confessed(clip, words):
    arms = [arm("a", [trial(s, clip=clip) for s in range(5)])]
    arms.append(arm("b", [trial(s, clip=clip) for s in range(5)], **{"clip.max_norm": 10.0}))
    (limit,) = [x for x in read(run(), arms)["cannot_tell"] if x["kind"] == "equal_clipping"]
    assert words in limit["text"]
    arms[1]["trials"][0]["summary"]["clipped_fraction"] = 0.123
    assert "equal_clipping" not in kinds(read(run(), arms))
    other = arm("c", arms[0]["trials"], **{"model.block": "post"})  # not the clipping sets them apart
    assert "equal_clipping" not in kinds(read(run(), [arms[0], other]))


def test_a_spike_score_that_is_undefined_is_confessed():
    arms = [arm("a", [trial(s, num_steps=240) for s in range(5)])]
    (limit,) = read(run(), arms)["cannot_tell"]
    assert limit["kind"] == "no_spike_score"
    assert limit["numbers"] == {"num": 5, "total": 5, "needed": 1000, "fewest": 240}


def test_pruned_failed_and_open_trials_and_the_scheduler_are_confessed():
    statuses = ["pruned", "pruned", "failed", "running", "pending"]
    trials = [trial(s) for s in range(5)] + [trial(s + 5, status=status) for s, status in enumerate(statuses)]
    reading = read(run(scheduler={"name": "asha"}), [arm("a", trials)])
    texts = [limit["text"] for limit in reading["cannot_tell"]]
    assert texts[0].startswith("2 of 10 trials were pruned")
    assert texts[1].startswith("1 of 10 trials failed")
    assert texts[2].startswith("2 of 10 trials have not ended")
    assert "scheduler 'asha'" in texts[3]
    assert reading["arms"][0]["statuses"]["pruned"] == 2


def test_half_precision_without_an_overflow_is_confessed():
    half = arm("half", [trial(s) for s in range(5)], precision="fp16")
    assert "no_overflow" in kinds(read(run(), [half]))
    half["trials"][3]["summary"]["num_nonfinite_grad_norm"] = 1
    assert "no_overflow" not in kinds(read(run(), [half]))
    stored = arm("stored", [trial(s) for s in range(5)], **{"model.scores": "float16"})
    assert "no_overflow" in kinds(read(run(), [stored]))


def test_unlike_seeds_are_confessed():
    a, b = figure()[0], figure()[2]
    del b["trials"][4]
    assert "uneven_seeds" in kinds(read(run(), [a, b]))


# Learning rates


def test_a_sweep_of_learning_rates_gives_its_sensitivity():
    arms = []
    for rate, end in ((1e-3, 2.0), (1e-2, 2.5), (1e-1, None)):
        trials = [trial(s) for s in range(3)]
        for entry in trials:
            entry["status"] = "diverged" if end is None else "finished"
            entry["summary"] |= {
                "initial_loss": 4.0,
                "final_loss": end,
                "counted_loss": 4.0 if end is None else end,
            }
        arms.append(arm(f"lr {rate}", trials, **{"optimizer.lr": rate}))
    (found,) = read(run(), arms)["lr_sensitivity"]
    assert (found["num_rates"], found["n"]) == (3, 3)
    assert found["mean"] == pytest.approx((0 + 0.5 + 2) / 3)
    assert read(run(), figure())["lr_sensitivity"] == []
    assert "## Learning-rate sensitivity" in to_markdown(read(run(), arms))


# Any run at all


def test_a_run_without_arms_or_results_is_read():
    for arms in ([], [arm("a", [])], [arm("a", [trial(0, status="pending")])]):
        reading = read({"id": "x", "study": None, "status": "running", "config": None, "notes": None}, arms)
        assert to_markdown(reading).startswith("# Reading of run `x`")
        json.dumps(reading, allow_nan=False)


def test_labels_with_bars_do_not_break_the_tables():
    rows = [line for line in to_markdown(read(run(), figure())).splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


summaries = st.fixed_dictionaries(
    {},
    optional={
        name: st.none() | st.floats(0, 1e6) | st.just(0)
        for name in ("start_grad_norm", "peak_grad_norm", "peak_step", "end_grad_norm", "final_loss")
        + ("initial_loss", "counted_loss", "clipped_fraction", "spike_score_grad_norm", "settling_step")
    },
)
trials = st.builds(
    lambda seed, status, summary: {
        "seed": seed,
        "status": status,
        "reason": "nonfinite_grad" if status == "diverged" else None,
        "no_ops": [],
        "summary": summary | {"undefined": {}},
    },
    st.integers(0, 3),
    st.sampled_from(["finished", "finished", "diverged", "pruned", "running", "failed"]),
    summaries,
)


@given(groups=st.lists(st.lists(trials, max_size=3), max_size=3))
@settings(deadline=None, max_examples=40)
def test_any_results_are_read_into_json_and_text_that_agree(groups):
    arms = [arm(f"arm {place}", group, **{"model.block": str(place)}) for place, group in enumerate(groups)]
    reading = read(run(), arms)
    json.dumps(reading, allow_nan=False)
    assert numbers_without_a_source(reading) == []


def test_every_kind_of_limit_is_tested_here():
    with open(__file__, encoding="utf-8") as source:
        text = source.read()
    untested = set(LIMITS) - set(re.findall(r'"(\w+)"', text)) - {"few_seeds", "trials_not_whole"}
    assert not untested

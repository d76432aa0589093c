"""What a run can't tell: the traps of its own design, found in its settings and numbers.

Every entry is {kind, text, numbers}. They are said beside each reading, since four lines in a figure
look like an answer whether or not they can be one.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from study.glossary import sentence
from study.selectors import Arm, differing, no_op_fields, within
from study.spikes import SPIKE_SCORE
from study.statistics import COUNTED

FEW_SEEDS = 5
Limit = dict[str, Any]


def find_limits(arms: Sequence[Arm], scheduler: str = "none") -> list[Limit]:
    """All of LIMITS that hold for these arms, in their order, and what the search's scheduler hides."""
    found = [{"kind": kind, **limit} for kind, limits in LIMITS.items() for limit in limits(arms)]
    if scheduler != "none":
        text = (
            "The scheduler '{name}' stops trials that look bad early: what they would have become is unknown."
        )
        found.append({"kind": "scheduler", **sentence(text, name=scheduler)})
    return found


def identical_pairs(arms: Sequence[Arm]) -> Iterator[tuple[Arm, Arm]]:
    """Pairs of arms that differ in nothing, or in nothing that has an effect."""
    no_ops = [no_op_fields(arm) for arm in arms]
    for (a, no_op_a), (b, no_op_b) in combinations(zip(arms, no_ops, strict=True), 2):
        if within(differing(a, b), no_op_a | no_op_b):
            yield a, b


def _ended(arms: Sequence[Arm]) -> list[Mapping[str, Any]]:
    return [trial for arm in arms for trial in arm["trials"] if trial["status"] in COUNTED]


def _summaries(arms: Sequence[Arm]) -> list[Mapping[str, Any]]:
    return [trial.get("summary") or {} for trial in _ended(arms)]


def _few_seeds(arms: Sequence[Arm]) -> Iterator[Limit]:
    counts = [len({trial["seed"] for trial in _ended([arm])}) for arm in arms]
    fewest = min(counts, default=0)
    if fewest == 1:
        yield sentence("An arm of {n} seed is an anecdote: nothing here tells an effect from chance.", n=1)
    elif 1 < fewest < FEW_SEEDS:
        text = "With {n} seeds in an arm only differences well above the spread of its seeds can be seen."
        yield sentence(text, n=fewest)


def _identical(arms: Sequence[Arm]) -> Iterator[Limit]:
    for a, b in identical_pairs(arms):
        precision = a["fields"].get("precision")
        text = "'{a}' and '{b}' are identical by construction{where}: whatever sets them apart is rounding."
        found = sentence(text, a=a["label"], b=b["label"], where=f" in {precision}" if precision else "")
        reasons = {
            reason for arm in (a, b) for trial in arm["trials"] for reason in trial.get("no_ops") or []
        }
        yield found | {"arms": [a["label"], b["label"]], "because": sorted(reasons)}


def _equal_clipping(arms: Sequence[Arm]) -> Iterator[Limit]:
    for a, b in combinations(arms, 2):
        fields = differing(a, b)
        if not fields or not within(fields, ["clip"]):
            continue
        by_seed = [
            {t["seed"]: (t.get("summary") or {}).get("clipped_fraction") for t in _ended([arm])}
            for arm in (a, b)
        ]
        shared = [
            seed for seed, fraction in by_seed[0].items() if fraction is not None and seed in by_seed[1]
        ]
        if not shared or any(by_seed[0][seed] != by_seed[1][seed] for seed in shared):
            continue
        share = 100 * sum(by_seed[0][seed] or 0.0 for seed in shared) / len(shared)
        text = (
            "'{a}' and '{b}' differ only in clipping, and by seed clipped the same {share} % of their steps"
        )
        text += _CLIPPED.get(share, ": this run says little of their thresholds.")
        yield sentence(text, a=a["label"], b=b["label"], share=share) | {"arms": [a["label"], b["label"]]}


_CLIPPED = {
    0.0: ": neither threshold had an effect.",
    100.0: ": under Adam and its kin, which divide by the gradient's size, neither had an effect.",
}


def _no_spike_score(arms: Sequence[Arm]) -> Iterator[Limit]:
    summaries = _summaries(arms)
    lacking = [s for s in summaries if s.get("spike_score_grad_norm") is None]
    if lacking:
        text = (
            "The spike score is undefined in {num} of {total} trials: it needs {needed} steps with a finite "
            "norm; the shortest trial has {fewest} steps."
        )
        fewest = min(s.get("num_steps") or 0 for s in lacking)
        yield sentence(text, num=len(lacking), total=len(summaries), needed=SPIKE_SCORE.needs, fewest=fewest)


def _not_whole(arms: Sequence[Arm]) -> Iterator[Limit]:
    trials = [trial for arm in arms for trial in arm["trials"]]
    pruned = sum(trial["status"] == "pruned" for trial in trials)
    failed = sum(trial["status"] == "failed" for trial in trials)
    open_ = sum(trial["status"] not in (*COUNTED, "pruned", "failed") for trial in trials)
    total = len(trials)
    if pruned:
        yield sentence(
            "{n} of {total} trials were pruned and are in no mean or verdict.", n=pruned, total=total
        )
    if failed:
        yield sentence("{n} of {total} trials failed and are in no mean or verdict.", n=failed, total=total)
    if open_:
        yield sentence(
            "{n} of {total} trials have not ended; this reading is of the others.", n=open_, total=total
        )


def _diverged_norms(arms: Sequence[Arm]) -> Iterator[Limit]:
    ended = _ended(arms)
    count = sum(trial["status"] == "diverged" for trial in ended)
    if count:
        text = (
            "{n} of {total} trials diverged: their losses count as the initial loss, but their norms are "
            "those of the steps before they broke."
        )
        yield sentence(text, n=count, total=len(ended))


def _no_overflow(arms: Sequence[Arm]) -> Iterator[Limit]:
    half = [arm for arm in arms if "fp16" in str(arm["fields"].get("precision"))]
    half += [arm for arm in arms if arm not in half and str(arm["fields"].get("model.scores")) == "float16"]
    counts = [
        summary.get(name) or 0
        for summary in _summaries(half)
        for name in ("num_nonfinite_grad_norm", "num_nonfinite_loss", "loss_scale_drops")
    ]
    if counts and not any(counts):
        text = (
            "Nothing overflowed in the {n} arms with half precision: protection from overflow was not tested."
        )
        yield sentence(text, n=len(half))


def _uneven_seeds(arms: Sequence[Arm]) -> Iterator[Limit]:
    seeds = [frozenset(trial["seed"] for trial in arm["trials"]) for arm in arms]
    if len(set(seeds)) > 1:
        yield sentence("Arms have unlike seeds: only the seeds that two arms share are compared.")


LIMITS = {
    "few_seeds": _few_seeds,
    "identical_arms": _identical,
    "equal_clipping": _equal_clipping,
    "no_spike_score": _no_spike_score,
    "trials_not_whole": _not_whole,
    "diverged_norms": _diverged_norms,
    "no_overflow": _no_overflow,
    "uneven_seeds": _uneven_seeds,
}

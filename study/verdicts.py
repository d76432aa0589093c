"""Verdicts: what the trials of a run say about a claim (see claims.py for the words).

`judge` measures one claim; `decide` corrects the measured p values for their number and ends it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from study import statistics
from study.glossary import BY_FACTORS, metric_of, say
from study.selectors import Arm, differing, flatten, known_fields, no_op_fields, resolve, within

if TYPE_CHECKING:
    from study.claims import Claim

ALPHA = 0.05
CONTINUOUS = (*BY_FACTORS, "nats")  # units in which two unlike trainings never give the same number by chance


@dataclass(frozen=True)
class Verdict:
    """What a run says about a claim.

    `value`, with its 95 % interval `low` to `high`, is a ratio or a difference (left to right), a
    slope or a diverged share, as `kind` says, over `n` seeds or, for a share, trials.
    """

    id: str
    say: str
    relation: str
    metric: str | None
    source: str
    verdict: Literal["supported", "contradicted", "undecided", "not_testable"] = "not_testable"
    reason: str = ""
    kind: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    p: float | None = None
    adjusted_p: float | None = None
    num_tests: int | None = None  # that p was corrected for
    needed: int | None = None
    left_mean: float | None = None
    right_mean: float | None = None
    num_diverged: int = 0
    num_trials: int = 0
    left: list[str] = field(default_factory=list)  # labels of the arms
    right: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def judge(claim: "Claim", left: Sequence[Arm], right: Sequence[Arm]) -> Verdict:
    """The numbers for a claim, and its verdict where no other claim has a say in it."""
    return _JUDGES[claim.relation](claim, left, right)


def decide(drafts: Sequence[Verdict]) -> list[Verdict]:
    """The drafts, those that rest on a p value decided after Holm's correction for all of these."""
    adjusted = statistics.holm([draft.p for draft in drafts])
    num_tests = sum(p is not None for p in adjusted)
    return [
        draft if p is None else _decide(replace(draft, adjusted_p=p, num_tests=num_tests))
        for draft, p in zip(drafts, adjusted, strict=True)
    ]


def _begin(claim: "Claim", left: Sequence[Arm], right: Sequence[Arm], kind: str | None = None) -> Verdict:
    trials = [t for arm in [*left, *right] for t in arm["trials"] if t["status"] in statistics.COUNTED]
    return Verdict(
        claim.id,
        claim.say,
        claim.relation,
        claim.metric,
        claim.source,
        kind=kind,
        num_diverged=sum(trial["status"] == "diverged" for trial in trials),
        num_trials=len(trials),
        left=[arm["label"] for arm in left],
        right=[arm["label"] for arm in right],
    )


# lower, higher, equal


def _judge_comparison(claim: "Claim", left: Sequence[Arm], right: Sequence[Arm]) -> Verdict:
    assert claim.metric is not None and claim.than is not None
    draft = _begin(claim, left, right)
    pairs = _pairs(claim, left, right)
    identical = bool(pairs) and all(
        within(differing(a, b), no_op_fields(a) | no_op_fields(b)) for a, b in pairs
    )
    if identical and claim.relation != "equal":
        precision = pairs[0][0]["fields"].get("precision")
        return replace(draft, reason="identical by construction" + (f" in {precision}" if precision else ""))
    by_ratio = statistics.decided_by_ratio(claim.metric)
    a, b, missing = _values_by_seed(claim, left, pairs)
    found = statistics.compare(_means(a, by_ratio), _means(b, by_ratio), log=by_ratio)
    if found.n == 0:
        why = "; ".join(sorted(set(missing))) or "no trial has ended"
        return replace(draft, reason=f"{claim.metric} can't be compared: {why}")
    ratio = found.ratio is not None
    draft = replace(
        draft,
        kind="ratio" if ratio else "difference",
        value=found.ratio if ratio else found.difference,
        low=found.ratio_low if ratio else found.low,
        high=found.ratio_high if ratio else found.high,
        n=found.n,
        needed=found.needed,
        left_mean=statistics.estimate(list(_means(a, False).values())).mean,
        right_mean=statistics.estimate(list(_means(b, False).values())).mean,
    )
    if claim.relation != "equal":
        return _undecided(draft) if found.p is None else replace(draft, p=found.p)
    assert claim.tolerance is not None
    if ratio:
        judged = _judge_interval(draft, 1 / (1 + claim.tolerance), 1 + claim.tolerance)
    else:
        room = claim.tolerance * (abs(draft.right_mean or 0.0) or 1.0)
        judged = _judge_interval(draft, -room, room)
    return replace(judged, reason=f"{judged.reason}; identical by construction") if identical else judged


def _pairs(claim: "Claim", left: Sequence[Arm], right: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    # Arms that differ in nothing but what the claim is about; where there are none, all with all.
    keys = [*flatten(getattr(claim, claim.relation))]
    keys += [*flatten(claim.than)] if isinstance(claim.than, Mapping) else []
    about = {resolve(key, known_fields([*left, *right])) for key in keys} if right else set()
    everything = [(a, b) for a in left for b in right]
    return [(a, b) for a, b in everything if within(differing(a, b), about)] or everything


Values = dict[int, list[float]]


def _values_by_seed(
    claim: "Claim", left: Sequence[Arm], pairs: Sequence[tuple[Arm, Arm]]
) -> tuple[Values, Values, list[str]]:
    # Each side's values by seed, of the pairs and seeds in which both sides have one (all, where no
    # pair has two seeds in common), and why there are no others.
    missing: list[str] = []

    def values(arm: Arm) -> dict[int, float]:
        assert claim.metric is not None
        found = statistics.sample(arm["trials"], claim.metric)
        missing.extend([*found.undefined.values(), *found.left_out.values()])
        return found.values

    if isinstance(claim.than, Mapping):
        sides = [(values(one), values(two)) for one, two in pairs]
    else:
        sides = [(found := values(arm), dict.fromkeys(found, float(claim.than or 0.0))) for arm in left]
    paired = any(len(set(one) & set(two)) > 1 for one, two in sides)
    a: Values = {}
    b: Values = {}
    for one, two in sides:
        for seed in [seed for seed in one if seed in two or not paired]:
            a.setdefault(seed, []).append(one[seed])
        for seed in [seed for seed in two if seed in one or not paired]:
            b.setdefault(seed, []).append(two[seed])
    return a, b, missing


def _means(values: Values, by_ratio: bool) -> dict[int, float]:
    if by_ratio and all(value > 0 for found in values.values() for value in found):
        return {seed: math.exp(float(np.log(found).mean())) for seed, found in values.items()}
    return {seed: sum(found) / len(found) for seed, found in values.items()}


def _decide(draft: Verdict) -> Verdict:
    assert draft.adjusted_p is not None and draft.value is not None and draft.metric is not None
    none = 1.0 if draft.kind == "ratio" else 0.0
    if draft.value == draft.low == draft.high == none:
        told = metric_of(draft.metric).unit in CONTINUOUS
        reason = f"the same value in every one of {draft.n} pairs"
        return replace(draft, verdict="contradicted" if told else "undecided", reason=reason)
    if draft.adjusted_p >= ALPHA:
        return _undecided(draft)
    holds = (draft.value < none) == (draft.relation == "lower")
    return replace(draft, verdict="supported" if holds else "contradicted", reason=_how_sure(draft))


# What all share


def _how_sure(draft: Verdict) -> str:
    what = {"share": "diverged share"}.get(str(draft.kind), draft.kind)
    numbers = f"{say(draft.value)}, {statistics.PERCENT} % interval {say(draft.low)} to {say(draft.high)}"
    return f"{what} {numbers}, n = {say(draft.n)}"


def _undecided(draft: Verdict) -> Verdict:
    what = "trial" if draft.kind == "share" else "seed"
    reason = f"undecided with {say(draft.n)} {what}{'s' if draft.n != 1 else ''}"
    if draft.needed is not None and draft.needed > draft.n:
        reason += f"; about {say(draft.needed)} would be needed"
    elif draft.needed is not None:
        reason += f"; not sure enough for one of {say(draft.num_tests)} claims" if draft.num_tests else ""
    elif draft.n > 1:
        reason += "; more of them would not tell, for a difference as small as this"
    if draft.low is not None:
        reason += f" ({_how_sure(draft)})"
    return replace(draft, verdict="undecided", reason=reason)


def _judge_interval(draft: Verdict, lowest: float, highest: float) -> Verdict:
    # Whether the value lies between two bounds; they give way to rounding.
    if draft.low is None or draft.high is None or draft.value is None:
        return _undecided(draft)
    slack = 1e-9 * max(abs(lowest), abs(highest))
    lowest, highest = lowest - slack, highest + slack
    if lowest <= draft.low and draft.high <= highest:
        return replace(draft, verdict="supported", reason=_how_sure(draft))
    if draft.high < lowest or draft.low > highest:
        return replace(draft, verdict="contradicted", reason=_how_sure(draft))
    room = min(draft.value - lowest, highest - draft.value)
    half = (draft.high - draft.low) / 2
    return _undecided(replace(draft, needed=statistics.needed_for_width(half, draft.n, room)))


# scales_as, diverges, converges


def _judge_scaling(claim: "Claim", arms: Sequence[Arm], _: Sequence[Arm]) -> Verdict:
    assert claim.metric is not None and claim.scales_as is not None
    over = resolve(claim.scales_as.over, known_fields(arms))
    draft = _begin(claim, arms, [], "slope")
    points: dict[int, dict[float, list[float]]] = {}  # seed -> size -> values
    for arm in arms:
        for seed, value in statistics.sample(arm["trials"], claim.metric).values.items():
            if value > 0:
                points.setdefault(seed, {}).setdefault(float(arm["fields"][over]), []).append(value)
    sizes = sorted({float(arm["fields"][over]) for arm in arms})
    slopes = [
        float(np.polyfit(np.log(sizes), [float(np.log(by_size[size]).mean()) for size in sizes], 1)[0])
        for by_size in points.values()
        if len(by_size) == len(sizes)
    ]
    if not slopes:
        return replace(draft, reason=f"no seed has a positive {claim.metric} at every {over}")
    low, high = statistics.interval(slopes) if len(slopes) > 1 else (None, None)
    draft = replace(draft, value=float(np.mean(slopes)), low=low, high=high, n=len(slopes))
    wanted, room = claim.scales_as.slope, claim.scales_as.tolerance
    return _judge_interval(draft, wanted - room, wanted + room)


def _judge_divergence(claim: "Claim", arms: Sequence[Arm], _: Sequence[Arm]) -> Verdict:
    draft = _begin(claim, arms, [], "share")
    if not draft.num_trials:
        return replace(draft, reason="no trial has ended")
    low, high = statistics.wilson(draft.num_diverged, draft.num_trials)
    share = draft.num_diverged / draft.num_trials
    needed = statistics.needed_trials(draft.num_diverged, draft.num_trials)
    draft = replace(draft, value=share, low=low, high=high, n=draft.num_trials, needed=needed)
    if low <= 0.5 <= high:
        return _undecided(draft)
    holds = (share > 0.5) == (claim.relation == "diverges")
    reason = f"{say(draft.num_diverged)} of {say(draft.num_trials)} diverged; {_how_sure(draft)}"
    return replace(draft, verdict="supported" if holds else "contradicted", reason=reason)


_JUDGES = {
    "lower": _judge_comparison,
    "higher": _judge_comparison,
    "equal": _judge_comparison,
    "scales_as": _judge_scaling,
    "diverges": _judge_divergence,
    "converges": _judge_divergence,
}

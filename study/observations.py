"""What stands out in a run: arms compared, and the sentences on it, the largest difference first."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from study import statistics
from study.glossary import sentence
from study.limits import identical_pairs
from study.selectors import Arm
from study.verdicts import ALPHA

Described = Mapping[str, Any]  # an arm in reading.py's words
MOST_OBSERVATIONS = 8


def compare_arms(arms: Sequence[Arm], described: Sequence[Described]) -> list[dict[str, Any]]:
    """Every arm with the first one in the metrics COMPARED, but for those that can't differ from it.

    Each entry is a statistics.Comparison with its `metric`, arms, p corrected for all entries,
    whether that tells the arms apart (`told`), and the `size` that observations are ordered by.
    """
    if not arms:
        return []
    first, *others = arms
    same = {b["label"] for a, b in identical_pairs(arms) if a is first}
    found: list[dict[str, Any]] = []
    pairs: list[tuple[statistics.Values, statistics.Values]] = []
    for metric in COMPARED:
        base = statistics.sample(first["trials"], metric).values
        for arm in others:
            if arm["label"] in same:
                continue
            values = statistics.sample(arm["trials"], metric).values
            by_ratio = statistics.decided_by_ratio(metric)
            comparison = vars(statistics.compare(values, base, log=by_ratio))
            if comparison["n"]:
                found.append({"metric": metric, "left": arm["label"], "right": first["label"], **comparison})
                pairs.append((values, base))
    for entry, p in zip(found, statistics.holm([entry["p"] for entry in found]), strict=True):
        entry["adjusted_p"] = p
        entry["told"] = p is not None and p < ALPHA
        entry["size"] = _size(entry, described[0]["metrics"].get(entry["metric"], {}).get("mean"))
    for entry, bounds in zip(found, statistics.bootstrap_intervals(pairs), strict=True):
        entry["bootstrap_low"], entry["bootstrap_high"] = bounds or (None, None)
    return found


def _size(entry: Mapping[str, Any], base: float | None) -> float:
    # The logarithm of a factor, or a difference as a share of what it is a difference from.
    if entry["ratio"] is not None:
        return abs(math.log(entry["ratio"]))
    return abs(entry["difference"]) / (abs(base) if base else 1.0)


def observe(described: Sequence[Described], compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sentences on what stands out: divergence, then differences in order of size, then the rest."""
    mortal = [arm for arm in described if arm["num_diverged"]]
    found = [_divergence(arm) for arm in sorted(mortal, key=lambda arm: -arm["num_diverged"])]
    told = sorted((entry for entry in compared if entry["told"]), key=lambda entry: -entry["size"])
    found += [_difference(entry, len(compared)) for entry in told[:MOST_OBSERVATIONS]]
    if len(told) > MOST_OBSERVATIONS:
        rest = len(told) - MOST_OBSERVATIONS
        found.append(sentence("Smaller differences that are told from chance too: {rest}.", rest=rest))
    return found + _extremes(described) + _undecided(compared)


def _divergence(arm: Described) -> dict[str, Any]:
    text = (
        "'{label}': {count} of {n} trials diverged ({reasons}; {percent} % interval of their share "
        "{low} to {high})."
    )
    return sentence(
        text,
        label=arm["label"],
        count=arm["num_diverged"],
        n=arm["num_ended"],
        reasons=", ".join(sorted(arm["reasons"])),
        percent=statistics.PERCENT,
        low=arm["diverged_low"],
        high=arm["diverged_high"],
    )


def _difference(entry: Mapping[str, Any], num_compared: int) -> dict[str, Any]:
    if entry["ratio"] is not None:
        lower, word = entry["ratio"] < 1, " times"
        value, low, high = entry["ratio"], entry["ratio_low"], entry["ratio_high"]
        if lower:
            value, low, high = 1 / value, 1 / high if high else None, 1 / low if low else None
    else:
        lower, word = entry["difference"] < 0, ""
        value, low, high = entry["difference"], entry["low"], entry["high"]
        if lower:
            value, low, high = -value, -high, -low
    text = (
        "'{left}' has a {metric} that is {value}{word} {way} than that of '{right}' ({percent} % interval "
        "{low} to {high}, {n} seeds, p = {p} corrected for {num_compared} comparisons)."
    )
    return sentence(
        text,
        left=entry["left"],
        right=entry["right"],
        metric=COMPARED[entry["metric"]],
        value=value,
        word=word,
        way="lower" if lower else "higher",
        percent=statistics.PERCENT,
        low=low,
        high=high,
        n=entry["n"],
        p=entry["adjusted_p"],
        num_compared=num_compared,
    )


def _extremes(described: Sequence[Described]) -> list[dict[str, Any]]:
    peaked = [arm for arm in described if {"peak_grad_norm", "peak_step"} <= arm["metrics"].keys()]
    if len(peaked) < 2:
        return []
    ordered = sorted(peaked, key=lambda arm: arm["metrics"]["peak_grad_norm"]["mean"])
    steps = [arm["metrics"]["peak_step"]["median"] for arm in peaked]
    return [
        sentence(
            "On average '{low}' peaks lowest, at {low_peak}, and '{high}' highest, at {high_peak}.",
            low=ordered[0]["label"],
            high=ordered[-1]["label"],
            low_peak=ordered[0]["metrics"]["peak_grad_norm"]["mean"],
            high_peak=ordered[-1]["metrics"]["peak_grad_norm"]["mean"],
        ),
        sentence(
            "The arms peak between steps {first} and {last} (medians over seeds)."
            if min(steps) < max(steps)
            else "The arms all peak at step {first} (medians over seeds).",
            first=min(steps),
            last=max(steps),
        ),
    ]


def _undecided(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    untold = [entry for entry in compared if not entry["told"]]
    if not untold:
        return []
    text = "{n} of {total} comparisons with '{first}' are undecided"
    numbers: dict[str, Any] = {"n": len(untold), "total": len(compared)}
    if needed := [entry["needed"] for entry in untold if (entry["needed"] or 0) > entry["n"]]:
        text += "; the nearest to a decision would need about {needed} seeds"
        numbers["needed"] = min(needed)
    return [sentence(text + ".", first=untold[0]["right"], **numbers)]


# What arms are compared in, and how the reading calls it.
COMPARED = {
    "peak_grad_norm": "peak gradient norm",
    "median_grad_norm": "median gradient norm",
    "end_grad_norm": "gradient norm at the end",
    "final_loss": "final loss",
    "olmo_core_spike_fraction": "fraction of spikes",
}

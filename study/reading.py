"""The reading of a run: what its lines do, what stands out, how sure, and what it can't tell.

    reading = read(run, arms)      # ready for JSON: every number, and the sentences made from them
    print(to_markdown(reading))

Sentences come from numbers through templates: each is {text, numbers}, and nothing numeric is said
that the JSON doesn't hold. `run`: {id, study, status, config, notes}; `arms`: {label, fields,
trials: [{seed, status, reason, summary, no_ops}]}, the first of them what the others are compared to.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from study import statistics
from study.claims import Verdict, check, evaluate
from study.glossary import say, sentence
from study.limits import find_limits
from study.metrics import lr_sensitivity
from study.observations import compare_arms, observe
from study.selectors import Arm, flatten

Reading = dict[str, Any]


def read(run: Mapping[str, Any], arms: Sequence[Arm]) -> Reading:
    """The reading of a run as it stands; any run will do, with no trial ended too."""
    config = run.get("config") or {}
    described = [_describe_arm(arm) for arm in arms]
    compared = compare_arms(arms, described)
    trials = [trial for arm in arms for trial in arm["trials"]]
    return {
        "run": run["id"],
        "study": run.get("study"),
        "status": run.get("status"),
        "level_percent": statistics.PERCENT,
        "num_arms": len(arms),
        "num_trials": len(trials),
        "num_seeds": len({trial["seed"] for trial in trials}),
        "notes": list(run.get("notes") or []),
        "lines": [_line(arm, found) for arm, found in zip(arms, described, strict=True)],
        "observations": observe(described, compared),
        "arms": described,
        "comparisons": compared,
        "lr_sensitivity": _lr_sensitivities(arms),
        "verdicts": [verdict.to_dict() for verdict in _verdicts(config.get("claims") or [], arms)],
        "cannot_tell": find_limits(arms, _scheduler(config)),
    }


def arms_of(trials: Sequence[Mapping[str, Any]]) -> list[Arm]:
    """Rows of trials, as the catalogue has them, as the arms that a reading is about."""
    arms: dict[int, Arm] = {}
    for row in trials:
        arm = {"label": row["arm"], "fields": flatten(row["config"]), "trials": []}
        arms.setdefault(row["arm_number"], arm)["trials"].append(
            {
                "seed": row["seed"],
                "status": row["status"],
                "reason": row.get("reason"),
                "summary": row.get("summary") or {},
                "no_ops": row.get("notes") or [],
            }
        )
    return [arms[number] for number in sorted(arms)]


def _scheduler(config: Mapping[str, Any]) -> str:
    chosen = (config.get("search") or {}).get("scheduler") or "none"
    return str(chosen.get("name", "none") if isinstance(chosen, Mapping) else chosen)


def _describe_arm(arm: Arm) -> dict[str, Any]:
    ended = [trial for trial in arm["trials"] if trial["status"] in statistics.COUNTED]
    diverged = [trial for trial in ended if trial["status"] == "diverged"]
    low, high = statistics.wilson(len(diverged), len(ended))
    metrics, undefined = {}, {}
    for name in HEADLINES:
        sample = statistics.sample(arm["trials"], name)
        if sample.values:
            metrics[name] = vars(statistics.estimate(list(sample.values.values())))
        else:
            undefined[name] = next(iter(sample.undefined.values()), "no trial has ended")
    return {
        "label": arm["label"],
        "num_trials": len(arm["trials"]),
        "num_ended": len(ended),
        "num_diverged": len(diverged),
        "diverged_low": low if ended else None,
        "diverged_high": high if ended else None,
        "diverged_seeds": [trial["seed"] for trial in diverged],
        "reasons": dict(Counter(str(trial.get("reason")) for trial in diverged)),
        "statuses": dict(Counter(trial["status"] for trial in arm["trials"])),
        "metrics": metrics,
        "undefined": undefined,
    }


def _line(arm: Arm, found: Mapping[str, Any]) -> dict[str, Any]:
    # What a person would say of the arm's line in a figure: medians over its seeds.
    def typical(name: str) -> float | None:
        return found["metrics"].get(name, {}).get("median")

    start, peak, step, end = map(typical, ("start_grad_norm", "peak_grad_norm", "peak_step", "end_grad_norm"))
    if start is None or peak is None or step is None:
        return {"arm": arm["label"], **sentence("no finite gradient norm to read")}
    numbers: dict[str, Any] = {"start": start, "peak": peak, "peak_step": step, "end": end}
    text = "starts at {start}, peaks at {peak} at step {peak_step}"
    planned = arm["fields"].get("steps")
    later, settled = typical("grad_norm_at_40_percent"), typical("settling_step")
    if later is not None and isinstance(planned, int | float):
        numbers |= {"later": later, "later_step": round(0.4 * planned)}
        falls = later < peak and step < 0.4 * planned
        text += ", falls to {later} by step {later_step}" if falls else ", is at {later} at step {later_step}"
    if end is not None:
        text += ", ends at {end}"
    if settled is not None:
        numbers["settled"] = settled
        text += " (settled from step {settled} on)"
    if found["num_diverged"]:
        numbers |= {"num_diverged": found["num_diverged"], "num_ended": found["num_ended"]}
        text += "; {num_diverged} of {num_ended} trials diverged"
    return {"arm": arm["label"], **sentence(text, **numbers)}


def _lr_sensitivities(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    # Arms that differ only in the learning rate, together; by seed, then over seeds.
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        others = {key: value for key, value in arm["fields"].items() if key not in (LR, "seed")}
        if LR in arm["fields"]:
            groups.setdefault(repr(sorted(others.items())), []).append(arm)
    found = []
    for group in groups.values():
        by_seed: dict[int, list[tuple[float, float, float]]] = {}
        for arm in group:
            losses = statistics.sample(arm["trials"], "counted_loss").values
            starts = statistics.sample(arm["trials"], "initial_loss").values
            for seed in losses.keys() & starts.keys():
                by_seed.setdefault(seed, []).append((float(arm["fields"][LR]), losses[seed], starts[seed]))
        values = []
        for runs in by_seed.values():
            rates, ends, firsts = np.array(runs).T
            values.append(lr_sensitivity(rates, ends, float(firsts.mean())))
        defined = [value for value in values if value is not None]
        if defined:
            estimate = vars(statistics.estimate(defined))
            num_rates = len({float(arm["fields"][LR]) for arm in group})
            found.append({"arms": [arm["label"] for arm in group], "num_rates": num_rates, **estimate})
    return found


def _verdicts(claims: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> list[Verdict]:
    # A reading is never refused: a claim that can't be read, or is about no arm (yet), is not testable.
    unreadable: dict[int, Verdict] = {}
    for place, claim in enumerate(claims):
        try:
            check([claim], arms)
        except ValueError as error:
            name, said = str(claim.get("id")), str(claim.get("say"))
            unreadable[place] = Verdict(name, said, "", None, str(claim.get("source", "")), reason=str(error))
    judged = iter(evaluate([c for place, c in enumerate(claims) if place not in unreadable], arms))
    return [unreadable[place] if place in unreadable else next(judged) for place in range(len(claims))]


def to_markdown(reading: Reading) -> str:
    """The reading as a page of Markdown, for a terminal, a pull request, or a chat."""
    counts = ", ".join(_count(reading[f"num_{noun}s"], noun) for noun in ("trial", "arm", "seed"))
    head = f"Study `{reading['study']}`: {counts}. Status: {reading['status']}."
    parts = [f"# Reading of run `{reading['run']}`", head]
    parts += [f"Note: {note}" for note in reading["notes"]]
    parts.append(
        _list("What each line does", [f"**{_inline(x['arm'])}** {x['text']}." for x in reading["lines"]])
    )
    parts.append(_list("What stands out", [x["text"] for x in reading["observations"]], ordered=True))
    rows = [_arm_row(arm) for arm in reading["arms"]]
    caption = f"Means over seeds; in brackets the {reading['level_percent']} % interval."
    parts.append(_table("Arms", ["arm", "ended", "diverged", *SHOWN.values()], rows, caption))
    if reading["lr_sensitivity"]:
        rows = [[", ".join(x["arms"]), say(x["num_rates"]), _mean(x)] for x in reading["lr_sensitivity"]]
        parts.append(_table("Learning-rate sensitivity", ["arms", "rates", "nats"], rows, caption))
    if reading["verdicts"]:
        rows = [
            [v["say"], v["verdict"].replace("_", " "), v["reason"], v["source"]] for v in reading["verdicts"]
        ]
        parts.append(_table("Claims", ["claim", "verdict", "why", "source"], rows))
    limits = [x["text"] + "".join(f" {why}." for why in x.get("because", [])) for x in reading["cannot_tell"]]
    parts.append(_list("What this run can't tell", limits))
    return "\n\n".join(part for part in parts if part) + "\n"


def _inline(text: Any) -> str:
    return " ".join(str(text).split())


def _mean(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    interval = f" ({say(estimate['low'])} to {say(estimate['high'])})" if estimate["low"] is not None else ""
    return say(estimate["mean"]) + interval


def _arm_row(arm: Mapping[str, Any]) -> list[str]:
    cells = [_mean(arm["metrics"].get(name)) for name in SHOWN]
    return [arm["label"], say(arm["num_ended"]), say(arm["num_diverged"]), *cells]


def _count(number: int, noun: str) -> str:
    return f"{say(number)} {noun}" + ("" if number == 1 else "s")


def _list(title: str, items: Sequence[str], ordered: bool = False) -> str:
    lines = [f"{place}. " if ordered else "- " for place in range(1, len(items) + 1)]
    lines = [bullet + _inline(item) for bullet, item in zip(lines, items, strict=True)]
    return f"## {title}\n\n" + "\n".join(lines) if items else ""


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join(
        "| " + " | ".join(_inline(cell).replace("|", "\\|") for cell in row) + " |" for row in lines
    )
    return f"## {title}\n\n" + (f"{caption}\n\n" if caption else "") + text


LR = "optimizer.lr"

# The columns of the table of arms, and all that the JSON has of an arm.
SHOWN = {
    "start_grad_norm": "start",
    "peak_grad_norm": "peak",
    "peak_step": "at step",
    "grad_norm_at_40_percent": "at two fifths",
    "end_grad_norm": "end",
    "final_loss": "final loss",
}
HEADLINES = (
    *SHOWN,
    "first_grad_norm",
    "median_grad_norm",
    "settling_step",
    "spike_score_grad_norm",
    "spike_score_loss",
    "olmo_core_spike_fraction",
    "clipped_fraction",
    "skipped_steps",
    "loss_scale_drops",
    "best_loss",
    "counted_loss",
    "best_val_loss",
    "peak_attn_logit_max",
)

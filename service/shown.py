"""How rows of the catalogue read on a page: words for numbers and times, progress, what differs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from service import fields
from service.pictures import described

Row = dict[str, Any]
LIVE = ("pending", "running", "lost")
ENDED = ("finished", "diverged", "pruned", "failed")
NOTHING = "–"


def number(value: Any) -> str:
    """Four significant digits; a dash where there is no value."""
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def setting(value: Any) -> str:
    """A value of a config as a study file would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def moment(seconds: float | None) -> str:
    """A time in UTC, to the minute."""
    if seconds is None:
        return NOTHING
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def duration(seconds: float | None) -> str:
    """Two units at most: 3 d 4 h, 12 min 5 s, 8 s."""
    if seconds is None:
        return NOTHING
    rest = max(0, round(seconds))
    for (word, size), (next_word, next_size) in zip(UNITS, UNITS[1:], strict=False):
        if rest >= size:
            further = rest % size // next_size
            return f"{rest // size} {word} {further} {next_word}" if further else f"{rest // size} {word}"
    return f"{rest} s"


UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def ago(seconds: float | None) -> str:
    """How long ago, in one unit."""
    if seconds is None:
        return NOTHING
    past = max(0.0, time.time() - seconds)
    for word, size in UNITS:
        if past >= size:
            return f"{int(past // size)} {word} ago"
    return "just now"


def took(row: Mapping[str, Any]) -> str:
    """From start to end; to the last sign of life for what has not ended."""
    start = row.get("started_at") or row.get("created_at")
    end = row["ended_at"] or row["heartbeat"]
    return duration(end - start) if start and end else NOTHING


@dataclass(frozen=True)
class Progress:
    """How far trials are: steps, or trials that have ended where no steps are known."""

    done: int
    total: int
    unit: str

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0

    @property
    def words(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.unit}"


def progress_of(trials: Sequence[Row]) -> Progress:
    """Over steps; a trial that has ended has done all that it will do."""
    done = sum(row["num_steps"] if row["status"] in ENDED else row["step"] for row in trials)
    return Progress(done, sum(row["num_steps"] for row in trials), "steps")


def progress_by_counts(counts: Mapping[str, int]) -> Progress:
    """Over trials, from how many have which status."""
    ended = sum(count for status, count in counts.items() if status in ENDED)
    return Progress(ended, sum(counts.values()), "trials")


def arm_label(row: Row) -> str:
    """An arm's words, as pictures have them."""
    return row["arm"] or described(row)


@dataclass(frozen=True)
class Difference:
    """What differs between arms: `fields` are the names, `rows` label, link and values of each arm."""

    fields: list[str]
    rows: list[tuple[str, str, list[str]]]
    shared: dict[str, str]


def difference(trials: Sequence[Row], several: bool = False) -> Difference:
    """The settings in which arms differ, and those that all share; seeds aside."""
    arms: dict[tuple[str, int], Row] = {}
    for row in trials:
        arms.setdefault((row["run_id"], row["arm_number"]), row)
    flats = {key: fields.flatten(row["config"]) for key, row in arms.items()}
    names = list(dict.fromkeys(name for flat in flats.values() for name in flat if name != "seed"))
    values = {name: [words(flat, name) for flat in flats.values()] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    rows = []
    for place, (key, row) in enumerate(arms.items()):
        label = f"{key[0]}: {arm_label(row)}" if several else arm_label(row)
        rows.append((label, row["id"], [values[name][place] for name in differing]))
    shared = {name: values[name][0] for name in names if name not in differing}
    return Difference(differing, rows, shared)


def words(flat: Mapping[str, Any], name: str) -> str:
    return setting(flat[name]) if name in flat else NOTHING


def notes_of(run: Row, trials: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Every note once, with the labels of the arms that it is about (none: the whole run)."""
    notes: dict[str, dict[str, None]] = {str(note): {} for note in run["notes"] or []}
    for row in trials:
        for note in row["notes"] or []:
            notes.setdefault(str(note), {})[arm_label(row)] = None
    return [(note, list(labels)) for note, labels in notes.items()]


def settings(trial: Row, differing: Sequence[str]) -> list[tuple[str, str, bool]]:
    """A trial's resolved config: name, value, and whether arms of its run differ in it."""
    flat = fields.flatten(trial["config"])
    return [(name, setting(value), name in differing) for name, value in flat.items()]


COUNTED = ("steps", "spikes", "drops", "%", "nats")  # units that a number needs beside it


def summary(trial: Row) -> list[tuple[str, str, str]]:
    """A trial's stability numbers: name, value with its unit (or why there is none), definition."""
    from study.glossary import metric_of

    numbers = dict(trial["summary"] or {})
    undefined = numbers.pop("undefined", {})
    shown = []
    for name, value in numbers.items():
        try:
            metric = metric_of(name)
            definition, unit = metric.definition, metric.unit if metric.unit in COUNTED else ""
        except ValueError:  # recorded by a version that knows more
            definition = unit = ""
        if value is None:
            text = f"{NOTHING} ({undefined[name]})" if name in undefined else NOTHING
        elif isinstance(value, list):
            text = ", ".join(map(number, value)) or "none"
        else:
            text = f"{number(value)} {unit}".strip()
        shown.append((name, text, definition))
    return shown


NUMBERS = ("final_loss", "median_grad_norm", "peak_grad_norm", "num_spikes_grad_norm", "clipped_fraction")


def arm_numbers(run: Row, trials: Sequence[Row]) -> Row:
    """An arm's numbers over its seeds: the mean, with the range where there are several."""
    answer: Row = {
        "run": run["id"], "label": arm_label(trials[0]), "id": trials[0]["id"], "num_trials": len(trials),
        "diverged": [row["seed"] for row in trials if row["status"] == "diverged"],
    }  # fmt: skip
    for name in NUMBERS:
        values = [(row["summary"] or {}).get(name) for row in trials]
        known = [value for value in values if value is not None]
        if not known:
            answer[name] = NOTHING
        elif len(known) == 1:
            answer[name] = number(known[0])
        else:
            mean = number(float(sum(known)) / len(known))
            answer[name] = f"{mean} ({number(min(known))} to {number(max(known))})"
    return answer

"""Filtering, sorting and grouping trials by any field of their row, config or summary.

A field is named in full (`model.norm`, `optimizer.lr`) or by its last word (`norm`, `lr`). The
`name` of a variant stands for the variant: `model.block` is `deepnorm`, not `{name: deepnorm}`.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.problems import bad_parameter
from study.selectors import flatten

Row = dict[str, Any]
ROW_FIELDS = (
    "id", "number", "arm", "arm_number", "seed", "status", "reason", "diverged_step", "step", "num_steps",
    "loss", "grad_norm", "steps_per_second", "started_at", "ended_at", "attempts", "num_parameters",
)  # fmt: skip


def fields_of(row: Row) -> dict[str, Any]:
    """Everything that a trial can be chosen by: row, config and summary, by dotted name."""
    summary = {f"summary.{name}": value for name, value in (row["summary"] or {}).items()}
    return {**summary, **flatten(row["config"]), **{name: row[name] for name in ROW_FIELDS}}


def values_of(field: str, fields: Mapping[str, Any]) -> list[Any]:
    """The values that a name can mean: the field of that full name, else all whose last words it is."""
    if field in fields:
        return [fields[field]]
    return [value for name, value in fields.items() if name.endswith(f".{field}")]


def known_fields(rows: Iterable[Row]) -> list[str]:
    """Every full name, in a fixed order."""
    return list(dict.fromkeys(name for row in rows for name in fields_of(row)))


def check_field(parameter: str, field: str, rows: Sequence[Row]) -> None:
    """A 422 Problem that names the known fields, unless some trial has this one (or there is none)."""
    if not rows or any(values_of(field, fields_of(row)) for row in rows):
        return
    known = sorted(known_fields(rows))
    near = difflib.get_close_matches(field, [*known, *(name.rpartition(".")[2] for name in known)], n=1)
    hint = f", did you mean '{near[0]}'?" if near else ""
    raise bad_parameter(parameter, f"unknown field '{field}'{hint}", known)


def matching(rows: Sequence[Row], where: Sequence[str]) -> list[Row]:
    """The trials for which every `field:value` holds; 422 for a field that none has."""
    for condition in where:
        field, colon, value = condition.partition(":")
        if not colon or not field:
            raise bad_parameter("where", f"'{condition}' is not field:value", ["field:value"])
        check_field("where", field, rows)
        rows = [row for row in rows if any(equals(one, value) for one in values_of(field, fields_of(row)))]
    return list(rows)


def equals(value: Any, text: str) -> bool:
    """Whether a config's value is what a URL calls `text`: 10 is 10.0, true is True, null is None."""
    if value is None:
        return text.lower() in ("null", "none", "")
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == float(value)
        except ValueError:
            return False
    return str(value) == text


def ordered(rows: Sequence[Row], sort: str) -> list[Row]:
    """Sorted by a field (`-field`: from the largest); trials without a value last, ties by number."""
    field = sort.removeprefix("-")
    check_field("sort", field, rows)
    keyed = [(next(iter(values_of(field, fields_of(row))), None), row) for row in rows]
    present = [(value, row) for value, row in keyed if value is not None]
    present.sort(key=lambda pair: pair[1]["number"])
    present.sort(key=lambda pair: _rank(pair[0]), reverse=sort.startswith("-"))
    return [row for _, row in present] + [row for value, row in keyed if value is None]


def _rank(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then everything else by its words: values of one field may differ in type."""
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, str(value))


def named(rows: Sequence[Row], trials: str | None) -> list[Row]:
    """The trials of a comma-separated list of ids or numbers; 422 for one that is not there."""
    if trials is None:
        return list(rows)
    by_name = {name: row for row in rows for name in (row["id"], str(row["number"]))}
    wanted = [word.strip() for word in trials.split(",") if word.strip()]
    for word in wanted:
        if word not in by_name:
            ids = [row["id"] for row in rows]
            listed = ids if len(ids) <= 20 else [*ids[:20], f"and {len(ids) - 20} more"]
            raise bad_parameter("trials", f"unknown trial '{word[:80]}'", listed or ["none yet"])
    return list({by_name[word]["id"]: by_name[word] for word in wanted}.values())

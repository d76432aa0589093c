"""Selectors: which arms a claim, or a reader, means by `{block: deepnorm, clip.max_norm: 1}`.

A trial's settings are flattened to dotted fields; a selector's key is such a field or its last
components (`block` for `model.block`), its value a setting or a variant with its options.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Scalar = str | int | float | bool | None
Fields = Mapping[str, Any]
Arm = Mapping[str, Any]  # {label, fields, trials: [{seed, status, reason, summary, no_ops}]}

IGNORED = ("seed",)  # what trials of one arm differ in


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Dotted fields of a nested config; `{name: pb_relax, alpha: 32}` under `relaxation` becomes
    `relaxation: pb_relax` and `relaxation.alpha: 32`, a list its text."""
    fields: dict[str, Scalar] = {}
    for key, value in config.items():
        field = f"{prefix}{key}"
        if key == "name" and prefix:
            fields[prefix.removesuffix(".")] = value
        elif isinstance(value, Mapping):
            fields |= flatten(value, f"{field}.")
        elif isinstance(value, list | tuple):
            fields[field] = str(list(value))
        else:
            fields[field] = value
    return fields


def same(given: Any, value: Any) -> bool:
    """Whether two settings are the same as numbers, or else as text: 10 is "10.0", True is "true"."""
    if isinstance(given, bool) or isinstance(value, bool):
        return str(given).lower() == str(value).lower()
    try:
        return float(given) == float(value)
    except (TypeError, ValueError):
        return str(given).lower() == str(value).lower()


def resolve(key: str, known: Iterable[str]) -> str:
    """The field that `key` means: itself, or the one that ends in it. ValueError: none, or several."""
    fields = sorted(set(known))
    if key in fields:
        return key
    found = [field for field in fields if field.endswith(f".{key}")]
    if len(found) > 1:
        raise ValueError(f"field '{key}' is ambiguous; it could be: {', '.join(found)}")
    if not found:
        raise ValueError(f"unknown field '{key}'; known: {', '.join(fields) or 'none'}")
    return found[0]


def select(selector: Mapping[str, Any], arms: Sequence[Arm]) -> list[Arm]:
    """The arms whose every selected field has the selected value; `label` is a field too.

    ValueError for a field that no arm has, and for a selector that no arm fits.
    """
    found = list(arms)
    for key, value in flatten(selector).items():
        field = resolve(key, known_fields(arms))
        found = [arm for arm in found if same(value, _fields(arm).get(field, _ABSENT))]
    if not found:
        raise ValueError(f"no arm fits {write(selector)}; arms: {'; '.join(arm['label'] for arm in arms)}")
    return found


_ABSENT = object()


def _fields(arm: Arm) -> dict[str, Any]:
    return {**arm["fields"], "label": arm["label"]}


def known_fields(arms: Iterable[Arm]) -> set[str]:
    """Every field that some arm has."""
    return {field for arm in arms for field in _fields(arm)} - set(IGNORED)


def differing(left: Arm, right: Arm) -> set[str]:
    """Fields in which two arms differ."""
    a, b = left["fields"], right["fields"]
    fields = {field for field, _ in a.items() ^ b.items()} - set(IGNORED)
    return {field for field in fields if not same(a.get(field, _ABSENT), b.get(field, _ABSENT))}


def within(fields: Iterable[str], roots: Iterable[str]) -> bool:
    """Whether every field is one of `roots` or an option of one: `model.relaxation.alpha`."""
    stems = list(roots)
    return all(any(field == stem or field.startswith(f"{stem}.") for stem in stems) for field in fields)


def no_op_fields(arm: Arm) -> set[str]:
    """Fields whose variant changes nothing in every trial of the arm.

    A trial's `no_ops` are fields, or sentences that begin with the variant's name.
    """
    by_trial = []
    for trial in arm["trials"]:
        found = set()
        for entry in trial.get("no_ops") or []:
            first = re.match(r"[\w.]*", entry)
            word = first[0].rstrip(".") if first else ""
            for field, value in arm["fields"].items():
                if word and (word in (value, field) or field.endswith(f".{word}")):
                    found.add(field)
        by_trial.append(found)
    return set.intersection(*by_trial) if by_trial else set()


def write(selector: Any) -> str:
    """A selector as a study file has it, on one line."""
    if isinstance(selector, Mapping):
        return "{" + ", ".join(f"{key}: {write(value)}" for key, value in selector.items()) + "}"
    return str(selector)

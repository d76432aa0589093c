"""From a word in a study file to an object: the one lookup that every table of variants shares.

A variant is one class and one line in one table (NORMS, BLOCKS, RELAXATIONS, CLIPS, ...). In a
study file it is `name`, or `{name: ..., option: value}`; its options are the keyword-only
arguments of its constructor, so a variant's signature is all the documentation that the
validation needs. What the constructor takes positionally is context (a width, a config) that the
caller supplies and a study file can't.
"""

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

Spec = str | Mapping[str, Any]
Table = Mapping[str, type]


class VariantError(ValueError):
    """A variant or option that no table knows; says what was given, what is known, and where."""


def one_line(error: Exception) -> str:
    """An exception's type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def unknown(kind: str, given: str, known: Iterable[str], where: str = "") -> VariantError:
    """The error of an unknown name: given, nearest, known, where."""
    names = sorted(known)
    nearest = difflib.get_close_matches(given, names, n=1)
    hint = f", did you mean '{nearest[0]}'?" if nearest else ""
    place = f" ({where})" if where else ""
    return VariantError(f"unknown {kind} '{given}'{hint}; known: {', '.join(names) or 'none'}{place}")


def normalize(spec: Spec) -> dict[str, Any]:
    """`name` and `{name, **options}` as the one form `{name, **options}`."""
    return {"name": spec} if isinstance(spec, str) else dict(spec)


def options_of(variant: type) -> dict[str, inspect.Parameter]:
    """The options that a variant takes: its constructor's keyword-only parameters, by name."""
    parameters = inspect.signature(variant).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def check(kind: str, table: Table, spec: Spec, where: str = "") -> dict[str, Any]:
    """The normal form of `spec`, or a VariantError that names what the table and variant know."""
    chosen = normalize(spec)
    name = str(chosen.get("name"))
    if name not in table:
        raise unknown(kind, name, table, where)
    options = options_of(table[name])
    for option in chosen:
        if option != "name" and option not in options:
            raise unknown(f"option of {kind} '{name}'", option, options, where)
    return chosen


def positive(what: str, number: float) -> float:
    """`number` as a float; a VariantError that names `what` unless it is finite and above 0."""
    if not 0 < number < math.inf:
        raise VariantError(f"{what} {number}; must be finite and above 0")
    return float(number)


def build(kind: str, table: Table, spec: Spec, *context: Any, where: str = "") -> Any:
    """The variant that `spec` names, constructed with `context` and the spec's options."""
    chosen = check(kind, table, spec, where)
    return table[chosen.pop("name")](*context, **chosen)

"""What an option's value may be, said in one line: the checks that constructors of variants share.

YAML reads `1e-3` as a word and `yes` as a truth, so a value is looked at before it is compared.
Each check gives the value back as a float, or raises a ValueError that names option, bound and value.
"""

import math


def number(name: str, value: float) -> float:
    """`value` as a finite float; ValueError for words, truths, NaN and inf."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def above(name: str, value: float, bound: float) -> float:
    """`value`, or a ValueError unless it is above `bound`."""
    if not number(name, value) > bound:
        raise ValueError(f"{name} must be above {bound:g}, got {value!r}")
    return float(value)


def at_least(name: str, value: float, bound: float) -> float:
    """`value`, or a ValueError unless it is `bound` or more."""
    if not number(name, value) >= bound:
        raise ValueError(f"{name} must be at least {bound:g}, got {value!r}")
    return float(value)


def decay(name: str, value: float) -> float:
    """`value`, or a ValueError unless it is in [0, 1): the range of a moving average's factor."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
    return float(value)


def count(name: str, value: int, bound: int) -> int:
    """`value`, or a ValueError unless it is a whole number of `bound` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < bound:
        raise ValueError(f"{name} must be a whole number of at least {bound}, got {value!r}")
    return value

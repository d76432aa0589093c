"""The space of a search: dotted keys of a trial, each with a distribution. Words are Ray's own.

    optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
    model.relaxation: [none, {name: softcap, cap: {uniform: [10, 50]}}]

A list is a choice. A distribution inside an option exists only where that option is chosen; Optuna
knows it as `model.relaxation.softcap.cap`. Values are drawn through the `suggest_*` methods of an
Optuna trial, so that drawing at random and searching are the same code.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from models.variants import unknown
from study.config import ConfigError

Params = dict[str, Any]  # what Optuna keeps: name -> number or label


class Trial(Protocol):
    """What draws values: optuna.Trial."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...

    def suggest_int(self, name: str, low: int, high: int) -> int: ...

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


class Distribution:
    """Base of the words: `draw` takes a value, `encode` finds the parameters that give a value."""

    def draw(self, trial: Trial, name: str) -> Any:
        """A value of this distribution; `name` is its parameter's."""
        raise NotImplementedError

    def encode(self, value: Any, name: str) -> Params:
        """The parameters with which `draw` returns `value`; ValueError if there are none."""
        low, high = vars(self)["low"], vars(self)["high"]
        if not _is_number(value) or not low <= value <= high:
            raise ValueError(f"{value!r} is not between {low:g} and {high:g}")
        return {name: float(value)}


@dataclass(frozen=True)
class Uniform(Distribution):
    """Any number from `low` to `high`."""

    low: float
    high: float

    def draw(self, trial: Trial, name: str) -> float:
        return trial.suggest_float(name, self.low, self.high)


@dataclass(frozen=True)
class LogUniform(Distribution):
    """Any number from `low` to `high`, even on a logarithmic scale."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if self.low <= 0:
            raise ValueError("its low end must be over 0")

    def draw(self, trial: Trial, name: str) -> float:
        return trial.suggest_float(name, self.low, self.high, log=True)


@dataclass(frozen=True)
class QUniform(Distribution):
    """Multiples of `q` from `low` to `high`, both included."""

    low: float
    high: float
    q: float

    def __post_init__(self) -> None:
        if self.q <= 0:
            raise ValueError("its step must be over 0")
        if any(abs(end / self.q - round(end / self.q)) > 1e-9 for end in (self.low, self.high)):
            raise ValueError(f"its ends must be multiples of {self.q:g}")

    def draw(self, trial: Trial, name: str) -> float:
        return trial.suggest_float(name, self.low, self.high, step=self.q)


@dataclass(frozen=True)
class RandInt(Distribution):
    """Whole numbers from `low` up to, but without, `high`."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not isinstance(self.low, int) or not isinstance(self.high, int):
            raise ValueError("its ends must be whole numbers")

    def draw(self, trial: Trial, name: str) -> int:
        return trial.suggest_int(name, self.low, self.high - 1)

    def encode(self, value: Any, name: str) -> Params:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value < self.high:
            raise ValueError(f"{value!r} is no whole number from {self.low} to {self.high - 1}")
        return {name: value}


@dataclass(frozen=True)
class Choice(Distribution):
    """One of `options`, by its label: a scalar as it is, a variant by its name."""

    options: dict[Any, Any]  # label -> value, or a mapping whose values may be distributions

    def draw(self, trial: Trial, name: str) -> Any:
        label = trial.suggest_categorical(name, list(self.options))
        option = self.options[label]
        if not isinstance(option, Mapping):
            return option
        return {
            key: value.draw(trial, f"{name}.{label}.{key}") if isinstance(value, Distribution) else value
            for key, value in option.items()
        }

    def encode(self, value: Any, name: str) -> Params:
        for label, option in self.options.items():
            if _same(value, label) or _same(value, option):
                return {name: label}
        for label, option in self.options.items():
            if isinstance(option, Mapping) and isinstance(value, Mapping) and option.keys() == value.keys():
                nested = {key: item for key, item in option.items() if isinstance(item, Distribution)}
                if all(_same(value[key], item) for key, item in option.items() if key not in nested):
                    params = {name: label}
                    for key, item in nested.items():
                        params |= item.encode(value[key], f"{name}.{label}.{key}")
                    return params
        known = ", ".join(str(label) for label in self.options)
        raise ValueError(f"{value!r} is none of the options; known: {known}")


def parse(key: str, raw: Any) -> Distribution:
    """The distribution that a study file gives for `key`; ConfigError if it is none."""
    where = f"space: {key}"
    if isinstance(raw, list):
        return _choice(key, raw)
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise ConfigError(
            f"a distribution must be a list or {{word: [...]}}, got {raw!r}; "
            f"known: {', '.join(WORDS)} ({where})"
        )
    word, arguments = next(iter(raw.items()))
    if word not in WORDS:
        raise ConfigError(str(unknown("distribution", str(word), WORDS, where)))
    if word == "choice":
        return _choice(key, arguments)
    names = [field.name for field in fields(WORDS[word])]
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ConfigError(f"{word} takes [{', '.join(names)}], got {arguments!r} ({where})")
    if not all(_is_number(argument) for argument in arguments):
        raise ConfigError(f"{word} takes finite numbers, got {arguments!r} ({where})")
    if not arguments[0] < arguments[1]:
        raise ConfigError(f"{word} takes a low end below its high end, got {arguments!r} ({where})")
    try:
        return WORDS[word](*arguments)
    except ValueError as error:
        raise ConfigError(f"{word} {arguments!r}: {error} ({where})") from None


def _choice(key: str, options: Any) -> Choice:
    if not isinstance(options, list) or not options:
        raise ConfigError(f"a choice must be a list that is not empty, got {options!r} (space: {key})")
    plain = not any(isinstance(option, Mapping | list) for option in options)
    parsed = [_option(key, option) for option in options]
    names = [
        str(option.get("name", option)) if isinstance(option, Mapping) else str(option) for option in options
    ]
    labelled: dict[Any, Any] = {}
    for raw, option, name in zip(options, parsed, names, strict=True):
        label = raw if plain else name if names.count(name) == 1 else _spelled(raw, name)
        if any(_same(label, other) for other in labelled):
            raise ConfigError(f"two options are alike: {raw!r} (space: {key})")
        labelled[label] = option
    if len(labelled) < len(options):
        raise ConfigError(f"two options are equal in {options!r} (space: {key})")  # 1 and true
    return Choice(labelled)


def _option(key: str, option: Any) -> Any:
    """An option with the distributions in it parsed; they are mappings of one of the words."""
    if not isinstance(option, Mapping):
        return option
    return {
        name: parse(f"{key}.{option.get('name', '')}.{name}", value) if _is_word(value) else value
        for name, value in option.items()
    }


def _spelled(raw: Any, name: str) -> str:
    if not isinstance(raw, Mapping):
        return name
    rest = {key: value for key, value in raw.items() if key != "name" and not _is_word(value)}
    return f"{name} {json.dumps(rest, sort_keys=True, default=str)}"


def _is_word(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in WORDS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


class Space:
    """Every key with its distribution."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.distributions = {key: parse(key, value) for key, value in raw.items()}

    def draw(self, trial: Trial) -> dict[str, Any]:
        """A point: dotted key -> value."""
        return {key: one.draw(trial, key) for key, one in self.distributions.items()}

    def encode(self, point: Mapping[str, Any], where: str) -> Params:
        """The parameters of a point, or of a part of one (the rest is drawn).

        A point may also name parameters of options: `model.relaxation.softcap.cap`. ConfigError if
        the space does not hold it.
        """
        known = self.distributions | self.nested()
        params: Params = {}
        for key, value in point.items():
            if key not in known:
                raise ConfigError(str(unknown("key", key, known, where)))
            try:
                params |= known[key].encode(value, key)
            except ValueError as error:
                raise ConfigError(f"{error} ({where}: {key})") from None
        return params

    def random_points(
        self, seed: int, first: Sequence[Params] = ()
    ) -> Iterator[tuple[Params, dict[str, Any]]]:
        """Without end: parameters and points, at random after those of `first`."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
        for params in first:
            study.enqueue_trial(params)
        while True:
            trial = study.ask()
            point = self.draw(trial)
            yield trial.params, point

    def nested(self) -> dict[str, Distribution]:
        """The distributions inside options, by parameter name."""
        found: dict[str, Distribution] = {}
        waiting = list(self.distributions.items())
        while waiting:
            name, one = waiting.pop()
            if not isinstance(one, Choice):
                continue
            for label, option in one.options.items():
                inner = option.items() if isinstance(option, Mapping) else ()
                here = [
                    (f"{name}.{label}.{key}", value)
                    for key, value in inner
                    if isinstance(value, Distribution)
                ]
                found |= dict(here)
                waiting += here
        return found


WORDS: dict[str, Any] = {
    "uniform": Uniform,
    "loguniform": LogUniform,
    "quniform": QUniform,
    "randint": RandInt,
    "choice": Choice,
}

"""One clear line about the first thing that is wrong with a study file: given, known, where."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from models.variants import unknown

TAGS = ("model is ours", "model is imported")


class ConfigError(ValueError):
    """A study that can't be run as it is written; one clear line."""


def validate(section: type[BaseModel], raw: Mapping[str, Any], where: str) -> Any:
    """`section` made from `raw`, or a ConfigError about the first thing that is wrong."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(section, error, where)) from None


def _explain(section: type[BaseModel], error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    # A section of two kinds puts the kind's tag behind its key, which no study file has.
    location = [str(part) for part in first["loc"] if part not in TAGS]
    place = ".".join(location)
    if where:
        place = f"{where}.{place}" if where.endswith(": trial") else f"{where}: {place}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(section, location[:-1])
        return str(unknown("key", location[-1], known, place))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{message} ({place})"
    if first["type"] == "missing":
        return f"a value is needed ({place})"
    return f"{message[0].lower()}{message[1:]}, got {first['input']!r} ({place})"


def _known_keys(section: Any, path: Iterable[str]) -> list[str]:
    for part in path:
        section = section.model_fields[part].annotation
        section = get_args(get_args(section)[0])[0] if get_origin(section) is Union else section
    if is_dataclass(section):
        return [field.name for field in fields(section) if field.name != "vocab_size"]
    return list(getattr(section, "model_fields", []))

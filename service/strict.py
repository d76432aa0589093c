"""Unknown query parameters are refused: a misspelt one would be silence where an answer was expected."""

import difflib
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from service.problems import bad_parameter


async def known_parameters(request: Request) -> None:
    """A 422 Problem for a parameter that the document of this route doesn't name.

    Pages, which are in no document, take what they like.
    """
    route = request.scope.get("route")
    if not request.query_params or not getattr(route, "include_in_schema", False):
        return
    known = names_of(route)
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            raise bad_parameter(name[:80], f"unknown parameter '{name[:80]}'{hint}", known or ["none"])


def names_of(route: Any) -> list[str]:
    """The query parameters of a route, those of a model among them."""
    names: list[str] = []
    for parameter in route.dependant.query_params:
        kind = parameter.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += [field.alias or name for name, field in kind.model_fields.items()]
        else:
            names.append(parameter.alias)
    return names

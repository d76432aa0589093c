"""Errors as RFC 9457 problem JSON: what was given, what is known, where.

Every error that leaves the service is a Problem; `install` turns whatever else was raised into one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pydantic_core
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from study.catalogue import CatalogueError
from study.schema import SchemaError

MEDIA_TYPE = "application/problem+json"
TITLES = {
    400: "Bad request",
    401: "Token needed",
    404: "Not found",
    405: "Method not allowed",
    422: "Bad parameter",
    500: "Internal error",
    503: "Not available now",
}
log = logging.getLogger("service")


class FieldProblem(BaseModel):
    """One parameter that can't be used as it is."""

    field: str
    message: str
    allowed: list[str] | None = None


class ProblemDocument(BaseModel):
    """An RFC 9457 problem."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[FieldProblem] = Field(default_factory=list)


class Problem(Exception):
    """An answer that is not the one asked for."""

    def __init__(
        self,
        status: int,
        detail: str,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors, self.headers = (
            status,
            detail,
            list(errors),
            dict(headers or {}),
        )

    def response(self, instance: str | None = None) -> Response:
        document = ProblemDocument(
            title=TITLES.get(self.status, "Error"),
            status=self.status,
            detail=self.detail,
            instance=instance,
            errors=self.errors,
        )
        content = pydantic_core.to_json(document, exclude_none=True)
        headers = {"Cache-Control": "no-store", **self.headers}
        return Response(content, self.status, headers, media_type=MEDIA_TYPE)


def not_found(identifier: str) -> Problem:
    """404 that names the id."""
    return Problem(
        404, f"no run or trial '{identifier}'; known: a run's id, 'latest', a trial's id (path: id)"
    )


def bad_parameter(field: str, message: str, allowed: Sequence[str] | None = None) -> Problem:
    """422 that names the field and what it may be."""
    known = f"; known: {', '.join(allowed)}" if allowed else ""
    error = FieldProblem(field=field, message=message, allowed=list(allowed) if allowed else None)
    return Problem(422, f"{message}{known} (query: {field})", [error])


def unavailable(detail: str, retry_after: int = 5) -> Problem:
    """503 that says when to come back."""
    return Problem(503, detail, headers={"Retry-After": str(retry_after)})


def _of_validation(error: RequestValidationError) -> Problem:
    errors = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"][1:]) or str(item["loc"][0])
        expected = (item.get("ctx") or {}).get("expected")
        allowed = (
            [word.strip(" '") for word in str(expected).replace(" or ", ", ").split(",")]
            if expected
            else None
        )
        errors.append(FieldProblem(field=field, message=item["msg"], allowed=allowed))
    detail = "; ".join(f"{problem.field}: {problem.message}" for problem in errors)
    return Problem(422, detail, errors)


def install(app: FastAPI) -> None:
    """Answer every exception of the routes as a problem."""

    def answer(request: Request, problem: Problem) -> Response:
        return problem.response(request.url.path)

    @app.exception_handler(Problem)
    async def on_problem(request: Request, error: Problem) -> Response:
        return answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> Response:
        return answer(request, _of_validation(error))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return answer(request, Problem(error.status_code, str(error.detail), headers=error.headers))

    async def on_away(request: Request, error: Exception) -> Response:
        log.warning("away", extra={"data": {"error": f"{type(error).__name__}: {error}"}})
        return answer(request, unavailable(_away(error)))

    for kind in (CatalogueError, SQLAlchemyError, OSError, pa.ArrowException):
        app.add_exception_handler(kind, on_away)


def _away(error: Exception) -> str:
    """What may be told to a client: no path, no statement, no driver text."""
    if isinstance(error, SchemaError):
        return str(error)
    if isinstance(error, CatalogueError | SQLAlchemyError):
        return "the database can't be read now"
    return "the storage can't be read now"


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: its problems, for the OpenAPI document."""
    schema = {"$ref": "#/components/schemas/ProblemDocument"}
    return {
        status: {"description": TITLES[status], "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }

"""The API's document: OpenAPI with its problems, and a page that shows it without foreign scripts."""

from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from service.problems import ProblemDocument

router = APIRouter(include_in_schema=False)
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328;"
    "background:#fff}code{background:#eef1f4;padding:.1rem .3rem;border-radius:.2rem}h2{font-size:1.05rem;"
    "margin:2rem 0 .2rem}td,th{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0}"
    "table{font-size:.9rem}a{color:#0550ae}@media(prefers-color-scheme:dark){body{color:#e6e9ec;"
    "background:#14181d}code{background:#2a3038}a{color:#7cb7ff}}"
)


def install(app: FastAPI, token: bool) -> None:
    """Give `app` its document: problem answers, and the bearer token where one is asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schema = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
            components = made.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas.update(schema.pop("$defs", {}))
            schemas["ProblemDocument"] = schema
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            if token:
                components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                for path, operations in made["paths"].items():
                    if path != "/healthz":
                        operations["get"]["security"] = [{"token": []}]
            name_plots(made)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    app.include_router(router)


def name_plots(document: dict[str, Any]) -> None:
    """Say which plots there are, where one is asked for; imported now, so that a start needn't wait."""
    from service.plots import PLOTS

    for operations in document["paths"].values():
        for parameter in operations["get"].get("parameters", []):
            if (parameter["name"], parameter["in"]) == ("plot", "path"):
                parameter["schema"]["enum"] = list(PLOTS)


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Every route with its parameters, from the OpenAPI document."""
    document = request.app.openapi()
    parts = [f"<h1>{escape(document['info']['title'])}</h1><p>{escape(document['info']['description'])}</p>"]
    parts.append('<p>For clients: <a href="/openapi.json">openapi.json</a></p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            rows = "".join(map(_parameter, operation.get("parameters", [])))
            if rows:
                parts.append(f"<table><tr><th>parameter<th>in<th>type<th>meaning</tr>{rows}</table>")
    body = "".join(parts)
    title = escape(document["info"]["title"])
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}: API</title><style>{STYLE}</style>'
        f"<main>{body}</main></html>"
    )


def _parameter(parameter: dict[str, Any]) -> str:
    schema = parameter.get("schema", {})
    cells = (parameter["name"], parameter["in"], _type(schema), parameter.get("description", ""))
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words: its type, its values, its bounds, its default."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    words = []
    for one in options:
        values = one.get("enum") or ([one["const"]] if "const" in one else None)
        words.append(", ".join(map(str, values)) if values else str(one.get("type", one.get("$ref", "")))
                     .rpartition("/")[2])  # fmt: skip
        bounds = [f"{sign} {one[key]}" for key, sign in (("minimum", ">="), ("maximum", "<=")) if key in one]
        words += bounds
    if schema.get("default") is not None:
        words.append(f"default {schema['default']}")
    return "; ".join(words)

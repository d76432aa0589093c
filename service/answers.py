"""Answers and what a cache may do with them: JSON, ETag, 304, how long a copy holds."""

import hashlib
from typing import Any

import pydantic_core
from fastapi import Request, Response

from service.store import Selection, Store

FOREVER = "max-age=31536000, immutable"
REVALIDATE = "no-cache"


def etag_of(*parts: object) -> str:
    """A weak tag (compressed copies count as the same) of whatever an answer depends on."""
    return f'W/"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'


def caching(etag: str, ended: bool) -> dict[str, str]:
    """Headers: what has ended never changes, everything else is asked for again."""
    return {"ETag": etag, "Cache-Control": f"private, {FOREVER if ended else REVALIDATE}"}


def unchanged(request: Request, etag: str, ended: bool = False) -> Response | None:
    """A 304 if the client's copy is the current one."""
    given = request.headers.get("if-none-match")
    if given is None:
        return None
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    if etag.removeprefix("W/") in tags or tags == ["*"]:
        return Response(status_code=304, headers=caching(etag, ended))
    return None


def json_bytes(content: Any) -> bytes:
    """JSON without NaN or Infinity, which no other parser would read."""
    return pydantic_core.to_json(content, inf_nan_mode="null")


def json_answer(request: Request, content: Any, ended: bool = False, etag: str | None = None) -> Response:
    """`content` as JSON, or 304 if the client has just that."""
    body = json_bytes(content)
    etag = etag or etag_of(body)
    return unchanged(request, etag, ended) or Response(
        body, headers=caching(etag, ended), media_type="application/json"
    )


def selection_etag(store: Store, selection: Selection, *parts: object) -> str:
    """The tag of an answer that depends on these trials' rows and traces, and on the request."""
    rows = [
        (row["id"], row["arm"], row["status"], row["diverged_step"], row["step"], row["ended_at"])
        for row in selection.trials
    ]
    stamps = [store.stamp(selection.run, row) for row in selection.trials]
    return etag_of(selection.run["id"], rows, stamps, *parts)

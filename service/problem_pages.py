"""A problem on the way to a page becomes a page: what the API would say, for people.

Around the whole application, so that a refused token, an unknown run, a database that is away and
an error all look alike, and no page has its own idea of them.
"""

import gzip
import json

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.problems import MEDIA_TYPE
from service.templates import render


class ProblemPages:
    """Replaces problem JSON by HTML where a page was asked for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_page(scope["path"]):
            return await self.app(scope, receive, send)
        start: Message | None = None
        body = b""

        async def answer(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                if Headers(scope=message).get("content-type", "").startswith(MEDIA_TYPE):
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                head = MutableHeaders(scope=start)
                if head.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                    del head["Content-Encoding"]
                content = page_of(body, scope)
                head["Content-Type"] = "text/html; charset=utf-8"
                head["Content-Length"] = str(len(content))
                await send(start)
                message = {
                    "type": "http.response.body",
                    "body": b"" if scope["method"] == "HEAD" else content,
                }
            await send(message)

        return await self.app(scope, receive, answer)


def is_page(path: str) -> bool:
    return path in ("/", "/ui") or path.startswith("/ui/")


def page_of(body: bytes, scope: Scope) -> bytes:
    """The page of a problem; a body that is cut off is a problem without details."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = {"title": "Error", "status": 500, "detail": ""}
    return render(
        "problem.html",
        problem=problem,
        wrong_token=problem.get("status") == 401 and b"token=" in scope["query_string"],
        path=scope["path"],
    ).encode()

"""What surrounds every request: an id, the token, security headers, HEAD, one log line, counters."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.monitor import Monitor
from service.problems import Problem

log = logging.getLogger("service.requests")
COOKIE = "gradnorm_token"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
OPEN_PATHS = ("/healthz",)
# Plotly sets styles on elements and draws into data: and blob: images; scripts come from here alone.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """The outermost layer: nothing gets past it without an answer, and no answer without headers."""

    def __init__(self, app: ASGIApp, monitor: Monitor, token: str | None) -> None:
        self.app, self.monitor = app, monitor
        self.token = token or None
        # The cookie holds a digest: what a browser keeps can't be used as the token.
        self.cookie = hmac.digest(token.encode(), b"gradnorm cookie", "sha256").hex() if token else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.match(given) else uuid.uuid4().hex
        method, begin = scope["method"], time.perf_counter()
        status, num_bytes = 0, 0

        async def answer(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["X-Request-ID"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    added.setdefault(name, value)
            elif message["type"] == "http.response.body":
                if method == "HEAD":
                    message = {**message, "body": b""}
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            refusal = self.refusal(scope, headers)
            app = refusal if refusal is not None else self.app
            await app({**scope, "method": "GET"} if method == "HEAD" else scope, receive, answer)
        except Exception as error:
            if status:
                raise
            log.exception("error", extra={"data": {"request_id": request_id, "error": type(error).__name__}})
            problem = Problem(500, f"an error in the service; its log has it as request {request_id}")
            await problem.response(scope["path"])(scope, receive, answer)
        finally:
            self.account(scope, status, num_bytes, time.perf_counter() - begin, request_id)
        return None

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request without the token; a browser that brings it in its URL gets a cookie."""
        if self.token is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.same(credentials.strip(), self.token):
            return None
        if self.same(_cookie(headers), self.cookie):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        brought = [value for name, value in query if name == "token"]
        if brought and self.same(brought[0], self.token):
            return self.welcome(scope, [pair for pair in query if pair[0] != "token"])
        problem = Problem(
            401,
            "this service asks for its token; known: header 'Authorization: Bearer TOKEN', or ?token=TOKEN "
            "once in a browser",
            headers={"WWW-Authenticate": "Bearer"},
        )
        return problem.response(scope["path"])

    def welcome(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Back to the same URL without the token, which is not to stay in histories and logs."""
        path = "/" + scope["path"].lstrip("/\\")  # '//host' would lead elsewhere
        target = path + (f"?{urlencode(query)}" if query else "")
        response = RedirectResponse(target, status_code=303, headers={"Cache-Control": "no-store"})
        secure = scope.get("scheme") == "https"
        response.set_cookie(
            COOKIE, self.cookie, httponly=True, samesite="lax", secure=secure, max_age=30 * 86400
        )
        return response

    @staticmethod
    def same(given: str, known: str) -> bool:
        """Equality in a time that tells nothing about where they differ, or how long the known one is."""
        digests = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (given, known))
        return hmac.compare_digest(*digests)

    def account(self, scope: Scope, status: int, num_bytes: int, seconds: float, request_id: str) -> None:
        """One log line and the counters; routes by their template, so that their number is bounded."""
        route = getattr(scope.get("route"), "path", "unknown")
        method = scope["method"] if scope["method"] in ("GET", "HEAD") else "other"
        self.monitor.requests.labels(method, route, str(status or 499)).inc()
        self.monitor.seconds.labels(route).observe(seconds)
        client = scope.get("client") or ("",)
        log.info(
            "request",
            extra={
                "data": {
                    "request_id": request_id, "method": scope["method"], "path": scope["path"][:300],
                    "route": route, "status": status or 499, "milliseconds": round(seconds * 1000, 1),
                    "bytes": num_bytes, "client": client[0],
                }
            },
        )  # fmt: skip


def _cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""

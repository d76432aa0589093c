"""The HTTP service, put together: settings, store, pools, routes.

uvicorn --factory service.app:create_app --port 8000
"""

import gc
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from starlette.middleware.gzip import GZipMiddleware

from service import docs, events, logs, monitor, pictures, problems, routes, ui
from service.context import Context
from service.guard import Guard
from service.settings import Settings
from service.strict import known_parameters

ROUTERS = (monitor.router, routes.router, events.router, pictures.router)


def create_app(settings: Settings | None = None) -> FastAPI:
    """A service over one catalogue and storage; settings from the environment if absent."""
    settings = settings or Settings()
    logs.configure(settings.log_level)
    context = Context.of(settings)
    context.monitor = monitor.Monitor(context)
    token = settings.token.get_secret_value() if settings.token else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # Threads that draw hold Python's lock for as long as this; requests wait for it several times each.
        sys.setswitchinterval(0.001)
        threading.Thread(target=warm, daemon=True).start()
        yield
        context.close()

    app = FastAPI(
        title="gradnorm-study",
        description="Gradient norm and loss of every step of every trial: numbers and pictures.",
        version="0.1.0",
        lifespan=lifespan,
        dependencies=[Depends(known_parameters)],
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    docs.install(app, token is not None)
    # Level 1: a trace's digits pack no better for three times the time.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    app.add_middleware(Guard, monitor=context.monitor, token=token)
    ui.install(app)
    return app


def warm() -> None:
    """Import what pictures need and draw an empty one, so that the first one doesn't wait for it."""
    from service.options import Kind, PictureOptions
    from service.plots import Scene, render

    render("gradnorm", Scene("", [], []), PictureOptions(), Kind.png)
    # A full collection goes through all that was ever imported, 150 ms in which nothing is answered; what
    # requests leave is little, and collected less often than Python's defaults have it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)

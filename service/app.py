"""The HTTP service, put together: settings, store, pools, routes.

uvicorn --factory service.app:create_app --port 8000
"""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from service import pictures, problems, routes, schemas
from service.context import Context
from service.settings import Settings


def create_app(settings: Settings | None = None) -> FastAPI:
    """A service over one catalogue and storage; settings from the environment if absent."""
    context = Context.of(settings or Settings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=warm, daemon=True).start()
        yield
        context.close()

    app = FastAPI(
        title="gradnorm-study",
        description="Gradient norm and loss of every step of every trial: numbers and pictures.",
        version="0.1.0",
        lifespan=lifespan,
    )
    app.state.context = context
    problems.install(app)

    @app.get("/healthz", tags=["service"])
    async def healthz() -> schemas.Health:
        """The process answers; asks neither the database nor the pools."""
        return schemas.Health()

    app.include_router(routes.router)
    app.include_router(pictures.router)
    return app


def warm() -> None:
    """Import what pictures need, so that the first one doesn't wait for it."""
    from service import plots  # noqa: F401

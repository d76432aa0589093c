"""What every request can use: the settings, the store, and the pools. One object an app."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from service.cache import ByteCache
from service.pool import Pool
from service.settings import Settings
from service.store import Store

if TYPE_CHECKING:
    from service.monitor import Monitor


@dataclass
class Context:
    """The parts of one service."""

    settings: Settings
    store: Store
    reads: Pool
    renders: Pool
    pictures: ByteCache[bytes]
    monitor: "Monitor" = field(init=False)

    @classmethod
    def of(cls, settings: Settings) -> "Context":
        return cls(
            settings,
            Store(settings),
            Pool("read", settings.read_workers, settings.read_queue, settings.read_timeout),
            Pool("render", settings.render_workers, settings.render_queue, settings.render_timeout),
            ByteCache(settings.picture_cache_mb << 20),
        )

    def close(self) -> None:
        self.renders.close()
        self.reads.close()
        self.store.close()


def context_of(request: Request) -> Context:
    return request.app.state.context


Ctx = Annotated[Context, Depends(context_of)]

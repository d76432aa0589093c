"""A bounded pool of threads: a limit on who works, a limit on who waits, and a limit in time.

Reading and drawing have a pool each, and neither is the pool that the web framework uses, so that
two hundred waiting pictures keep no health check from its answer.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from service.problems import unavailable

Result = TypeVar("Result")


class Pool:
    """Runs functions in threads; a 503 Problem where too many wait or one takes too long."""

    def __init__(self, name: str, workers: int, queue: int, timeout: float) -> None:
        self.name, self.workers, self.queue, self.timeout = name, workers, queue, timeout
        self.num_pending = 0  # working or waiting
        self.num_refused = 0
        self.num_timeouts = 0
        self.num_done = 0
        self.seconds = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._flying: dict[Hashable, asyncio.Future[Any]] = {}

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_pending - self.workers)

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises; it goes on in its thread if nobody waits for it any more."""
        if self.num_pending >= self.workers + self.queue:
            self.num_refused += 1
            raise unavailable(
                f"{self.num_waiting} requests wait for '{self.name}' already; limit: {self.queue}"
            )
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix=self.name)
        with self._lock:
            self.num_pending += 1
        begin = time.perf_counter()
        future = self._executor.submit(work)
        # A thread that is given up still works: it counts until it is done.
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.timeout)
        except TimeoutError:
            self.num_timeouts += 1
            raise unavailable(f"'{self.name}' took longer than {self.timeout:g} s") from None
        finally:
            self.seconds += time.perf_counter() - begin

    async def shared(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """As `run`, but all who ask for the same key at the same time get the one result."""
        flying: asyncio.Future[Result] | None = self._flying.get(key)
        if flying is None:
            flying = asyncio.ensure_future(self.run(work))
            self._flying[key] = flying
            flying.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(flying)

    def _landed(self, key: Hashable, done: "asyncio.Future[Any]") -> None:
        self._flying.pop(key, None)
        if not done.cancelled():
            done.exception()  # seen: whoever asked may have gone

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self.num_pending -= 1
            self.num_done += 1

    def close(self) -> None:
        """Drop what waits; what works is left to end. The next `run` opens the pool again."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

"""The pool's bounds: who works, who waits, how long; and one picture for all who ask at once."""

import asyncio
import threading
import time

import pytest

from service.cache import ByteCache
from service.pool import Pool
from service.problems import Problem


def test_a_full_queue_refuses_with_a_time_to_come_back():
    async def scenario() -> None:
        pool, gate = Pool("test", workers=1, queue=2, timeout=5), threading.Event()
        waiting = [asyncio.ensure_future(pool.run(gate.wait)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(Problem) as refusal:
            await pool.run(lambda: None)
        assert (refusal.value.status, pool.num_waiting) == (503, 2)
        assert int(refusal.value.headers["Retry-After"]) > 0
        gate.set()
        await asyncio.gather(*waiting)
        assert await pool.run(lambda: "free again") == "free again"

    asyncio.run(scenario())


def test_work_that_takes_too_long_is_given_up_but_still_counts():
    async def scenario() -> None:
        pool, gate = Pool("test", workers=1, queue=1, timeout=0.1), threading.Event()
        begin = time.perf_counter()
        with pytest.raises(Problem) as refusal:
            await pool.run(gate.wait)
        assert refusal.value.status == 503
        assert time.perf_counter() - begin < 1
        assert pool.num_pending == 1
        gate.set()
        await asyncio.sleep(0.05)
        assert pool.num_pending == 0

    asyncio.run(scenario())


def test_the_same_picture_is_drawn_once_for_all_who_ask():
    calls = []

    async def scenario() -> list[int]:
        pool = Pool("test", workers=4, queue=10, timeout=5)

        def draw() -> int:
            time.sleep(0.05)
            calls.append(1)
            return len(calls)

        return await asyncio.gather(*(pool.shared("key", draw) for _ in range(8)))

    assert asyncio.run(scenario()) == [1] * 8


def test_an_error_reaches_everyone_who_asked():
    async def scenario() -> list[BaseException]:
        pool = Pool("test", workers=1, queue=10, timeout=5)
        return await asyncio.gather(
            *(pool.shared("key", lambda: 1 / 0) for _ in range(3)), return_exceptions=True
        )

    assert [type(error) for error in asyncio.run(scenario())] == [ZeroDivisionError] * 3


def test_the_cache_forgets_what_was_used_longest_ago():
    cache: ByteCache[str] = ByteCache(10)
    cache.put("a", "a", 4)
    cache.put("b", "b", 4)
    assert cache.get("a") == "a"
    cache.put("c", "c", 4)
    assert (cache.get("b"), cache.get("a"), cache.num_bytes) == (None, "a", 8)
    cache.put("huge", "huge", 11)
    assert cache.get("huge") is None
    cache.put("a", "again", 2)
    assert (cache.get("a"), cache.num_bytes) == ("again", 6)

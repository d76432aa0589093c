"""The service under load: 64 clients with mixed questions on loopback, and a health check beside them.

    python tests/bench/bench_load.py [SECONDS]

Errors other than 503 and a slow health check are what it looks for; it says what it saw.
"""

import asyncio
import collections
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import TinyStore  # noqa: E402 - after the path that leads there

CLIENTS = 64


def serve(folder: Path) -> tuple[subprocess.Popen, str]:
    """The service as it is deployed: a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "--factory", "service.app:create_app", "--port", str(port)],
        env=os.environ | {"GRADNORM_STORAGE": str(folder), "GRADNORM_LOG_LEVEL": "error"},
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            if httpx.get(f"{base}/healthz").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.05)
    return process, base


def question(choice: random.Random) -> str:
    """What somebody might ask."""
    run = f"run-{choice.randrange(20):02d}"
    return choice.choice(
        [
            "/runs", "/runs?status=finished", f"/runs/{run}", f"/runs/{run}/trials?where=block:pre",
            f"/runs/{run}/traces", "/runs/long/traces?from=20000&to=30000", f"/runs/{run}/gradnorm.png",
            f"/runs/long/loss.png?width={choice.randrange(400, 1200)}", "/metrics", f"/runs/{run}/events",
            f"/compare/gradnorm.png?runs={run},long",
        ]
    )  # fmt: skip


async def load(base: str, seconds: float) -> None:
    statuses: collections.Counter[int] = collections.Counter()
    waits: list[float] = []
    end = time.monotonic() + seconds

    async def ask(number: int) -> None:
        choice = random.Random(number)
        async with httpx.AsyncClient(base_url=base, timeout=60, verify=False) as client:
            while time.monotonic() < end:
                statuses[(await client.get(question(choice))).status_code] += 1

    async def watch() -> None:
        async with httpx.AsyncClient(base_url=base, timeout=60, verify=False) as client:
            while time.monotonic() < end:
                begin = time.perf_counter()
                (await client.get("/healthz")).raise_for_status()
                waits.append((time.perf_counter() - begin) * 1000)
                await asyncio.sleep(0.1)

    await asyncio.gather(watch(), *map(ask, range(CLIENTS)))
    print(f"{CLIENTS} clients, {seconds:g} s: answers {dict(statuses)}")
    middle, most, worst = np.percentile(waits, [50, 95, 100])
    print(
        f"health check: median {middle:.0f} ms, 95 % within {most:.0f} ms, slowest {worst:.0f} ms (limit 100)"
    )
    if set(statuses) - {200, 204, 503}:
        sys.exit("an error other than 503")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = TinyStore(Path(folder) / "runs")
        store.add_run("long", steps=100_000)
        for number in range(20):
            store.add_run(f"run-{number:02d}", steps=1200, seeds=2)
        process, base = serve(store.folder)
        try:
            asyncio.run(load(base, float(sys.argv[1]) if len(sys.argv) > 1 else 20))
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    main()

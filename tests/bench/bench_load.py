"""The service under load: 64 clients with mixed questions on loopback, and a health check beside them.

    python tests/bench/bench_load.py [SECONDS]

The clients are wrk's where it is installed (apt-get install wrk), else Python's, which take more of
the machine from the service. The health check is a process of its own. Errors other than 503 and a
slow health check are what it looks for; it says what it saw.
"""

import asyncio
import collections
import http.client
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import TinyStore  # noqa: E402 - after the path that leads there
from servers import free_port  # noqa: E402

CLIENTS = 64


def serve(folder: Path) -> tuple[subprocess.Popen, str]:
    """The service as it is deployed: a process of its own."""
    port = free_port()
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


def watch(port: int, seconds: float, answers: Any) -> None:
    """Milliseconds of a health check, ten a second, from a process of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    waits = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b'{"status":"ok"}')
        waits.append((time.perf_counter() - begin) * 1000)
        time.sleep(0.1)
    answers.put(waits)


async def python_clients(base: str, seconds: float) -> dict[int, int]:
    """How many answers of each status CLIENTS clients got."""
    statuses: collections.Counter[int] = collections.Counter()
    end = time.monotonic() + seconds

    async def ask(number: int) -> None:
        choice = random.Random(number)
        async with httpx.AsyncClient(base_url=base, timeout=60, verify=False) as client:
            while time.monotonic() < end:
                statuses[(await client.get(question(choice))).status_code] += 1

    await asyncio.gather(*map(ask, range(CLIENTS)))
    return dict(statuses)


# wrk says how many answers were errors, not which: each thread counts its statuses and prints them.
SCRIPT = """
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init() counts = ""; seen = {} end
local paths = {PATHS}
function request() return wrk.format("GET", paths[math.random(#paths)]) end
function response(status)
  seen[status] = (seen[status] or 0) + 1
  counts = ""
  for key, value in pairs(seen) do counts = counts .. key .. "=" .. value .. " " end
end
function done() for _, thread in ipairs(threads) do print("statuses " .. thread:get("counts")) end end
"""


def wrk_clients(base: str, seconds: float, folder: str) -> dict[int, int]:
    """The same from wrk's clients; those cut off at the end are not counted."""
    choice = random.Random(0)
    paths = ", ".join(f'"{question(choice)}"' for _ in range(500))
    script = Path(folder) / "questions.lua"
    script.write_text(SCRIPT.replace("PATHS", paths))
    command = ["wrk", "-t", "1", "-c", str(CLIENTS), "-d", f"{seconds:g}s", "--timeout", "60s"]
    command += ["-s", str(script), base]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(\d+)=(\d+)", said.partition("statuses")[2])
    if errors := re.search(r"Socket errors: .*", said):
        print(errors[0])
    return {int(status): int(count) for status, count in found}


def load(base: str, seconds: float, folder: str) -> None:
    answers: Any = multiprocessing.Queue()
    watcher = multiprocessing.Process(target=watch, args=(int(base.rpartition(":")[2]), seconds, answers))
    watcher.start()
    if shutil.which("wrk"):
        tool, statuses = "wrk", wrk_clients(base, seconds, folder)
    else:
        tool, statuses = "python", asyncio.run(python_clients(base, seconds))
    waits = answers.get()
    watcher.join()
    print(f"{CLIENTS} clients ({tool}), {seconds:g} s: answers {statuses}")
    middle, most, worst = np.percentile(waits, [50, 99, 100])
    print(
        f"health check, {len(waits)} times: median {middle:.0f} ms, 99 % within {most:.0f} ms, "
        f"slowest {worst:.0f} ms (limit 100)"
    )
    if not statuses or set(statuses) - {200, 204, 503}:
        sys.exit("an error other than 503")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = TinyStore(Path(folder) / "runs")
        store.add_run("long", steps=100_000)
        for number in range(20):
            store.add_run(f"run-{number:02d}", steps=1200, seeds=2)
        process, base = serve(store.folder)
        try:
            httpx.get(f"{base}/runs/long/gradnorm.png", timeout=60)  # its start is not what is measured
            load(base, float(sys.argv[1]) if len(sys.argv) > 1 else 60, folder)
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    main()

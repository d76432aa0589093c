"""What a logger costs a trial: CPU microseconds and bytes a step, beside the trace.

    python tests/bench/bench_loggers.py [--steps 10000]

One trial of the seven columns that every trial has, flushed every 200 steps. Counted is the time of all
threads of this process and of the processes that a package starts (wandb). Beginning and ending are
left out and shown apart: they are once a trial.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from study.loggers import LOGGERS, LoggedTrial
from study.storage import Storage
from study.traces import TraceWriter

FLUSH = 200
COLUMNS = ("loss", "grad_norm", "grad_norm_clipped", "lr", "clip_threshold", "loss_scale")
OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensorboard": lambda _: {},
    "mlflow": lambda folder: {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
    "wandb": lambda _: {"mode": "offline"},
}


def rows(first: int, count: int) -> dict[str, Any]:
    random = np.random.default_rng(first)
    columns = {name: random.standard_normal(count).astype(np.float32) for name in COLUMNS}
    return {
        "step": np.arange(first, first + count, dtype=np.int32),
        "skipped": np.zeros(count, bool),
        **columns,
    }


def cpu_seconds() -> float:
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def line(name: str, once: float, seconds: float, wall: float, written: int, steps: int) -> None:
    print(
        f"{name:12} {seconds / steps * 1e6:8.1f} us {wall / steps * 1e6:8.1f} us of waiting "
        f"{written / steps:8.1f} bytes a step   {once:6.1f} s to begin and end"
    )


def measure(name: str, steps: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        logger = LOGGERS[name](**OPTIONS[name](folder))
        trial = LoggedTrial("run", "run_00000", "arm", {"model.norm": "rms"}, Storage(folder), 1, 0)
        began = time.monotonic()
        logger.prepare()
        logger.begin(trial)
        once = time.monotonic() - began
        before, size_before, began = cpu_seconds(), size(folder), time.monotonic()
        for first in range(1, steps, FLUSH):
            logger.log(rows(first, FLUSH))
        wall = time.monotonic() - began
        time.sleep(2.0 if name == "wandb" else 0.0)  # its own process may lag behind
        seconds = cpu_seconds() - before
        began = time.monotonic()
        logger.end("finished", steps, {"final_loss": 1.0})
        once += time.monotonic() - began
        line(name, once, seconds, wall, size(folder) - size_before, steps)


def measure_trace(steps: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        writer = TraceWriter(Storage(place), "run", "run_00000")
        writer.append(rows(1, FLUSH))
        before, began = cpu_seconds(), time.monotonic()
        for first in range(FLUSH + 1, steps, FLUSH):
            writer.append(rows(first, FLUSH))
        writer.close()
        seconds, wall = cpu_seconds() - before, time.monotonic() - began
        line("trace", 0.0, seconds, wall, size(Path(place)), steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    print(f"{steps:,} steps of {len(COLUMNS) + 1} columns, flushed every {FLUSH}")
    measure_trace(steps)
    for name in OPTIONS:
        measure(name, steps)


if __name__ == "__main__":
    main()

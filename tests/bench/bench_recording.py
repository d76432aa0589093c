"""What recording costs: CPU microseconds and bytes a step, beside tensorboardX in the same process.

    python tests/bench/bench_recording.py [--steps 100000] [--tensorboard-steps 2500]

4 trials of 4 columns of random floats, flushed every 1,000 steps, merged and closed: the worst case
for compression. tensorboardX gets the first steps of the same numbers (all of them would take
minutes). The Recorder's share, keeping 0-dim tensors and bringing them over, comes apart: it would
be there with any writer.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tensorboardX import SummaryWriter

from study.recording import Recorder
from study.storage import Storage
from study.traces import TraceWriter

TRIALS, FLUSH = 4, 1000
COLUMNS = ("loss", "grad_norm", "grad_norm_clipped", "lr")
TARGET_MICROSECONDS, TARGET_BYTES = 10.0, 24.0

Numbers = dict[str, np.ndarray]


def random_numbers(trial: int, steps: int) -> Numbers:
    random = np.random.default_rng(trial)
    return {name: random.standard_normal(steps).astype(np.float32) for name in COLUMNS}


def write_traces(folder: Path, numbers: list[Numbers], steps: int) -> None:
    storage = Storage(folder)
    for trial, columns in enumerate(numbers):
        writer = TraceWriter(storage, "run", f"run_{trial:05d}")
        for first in range(0, steps, FLUSH):
            last = min(first + FLUSH, steps)
            rows = {name: values[first:last] for name, values in columns.items()}
            writer.append({"step": np.arange(first + 1, last + 1, dtype=np.int32), **rows})
        writer.close()


def write_events(folder: Path, numbers: list[Numbers], steps: int) -> None:
    for trial, columns in enumerate(numbers):
        writer = SummaryWriter(str(folder / f"run_{trial:05d}"))
        values = {name: column.tolist() for name, column in columns.items()}
        for step in range(steps):
            for name in COLUMNS:
                writer.add_scalar(name, values[name][step], step + 1)
        writer.close()


def cost(write: Callable[[Path, list[Numbers], int], None], numbers: list[Numbers], steps: int) -> str:
    """One line: CPU time of all threads of this process, and what lies on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write(Path(folder), numbers, steps)
        seconds = time.process_time() - began
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    done = TRIALS * steps
    return f"{seconds / done * 1e6:9.1f} us {size / done:9.1f} bytes a step   ({TRIALS} x {steps:,} steps)"


def recorder_cost(steps: int) -> str:
    recorder = Recorder(torch.device("cpu"))
    row = {name: torch.tensor(0.5) for name in COLUMNS if name != "lr"} | {"skipped": torch.tensor(False)}
    began = time.process_time()
    for step in range(1, steps + 1):
        recorder.add(step, dict(row), lr=0.1, sampled={})
        if step % FLUSH == 0:
            recorder.flush()
    return f"{(time.process_time() - began) / steps * 1e6:9.1f} us {'':>22}   ({steps:,} steps)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensorboard-steps", type=int, default=2_500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [random_numbers(trial, options.steps) for trial in range(TRIALS)]
    write_traces(Path(tempfile.mkdtemp()), numbers, FLUSH)  # imports and caches are not a step's cost
    print(f"traces        {cost(write_traces, numbers, options.steps)}")
    print(f"tensorboardX  {cost(write_events, numbers, min(options.steps, options.tensorboard_steps))}")
    print(f"recorder      {recorder_cost(min(options.steps, 20_000))}")
    print(f"target        {TARGET_MICROSECONDS:9.1f} us {TARGET_BYTES:9.1f} bytes a step, traces alone")


if __name__ == "__main__":
    main()

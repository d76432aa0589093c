"""Real runs for tests: the command as a process of its own, and what it left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.multiprocessing as processes

from study.catalogue import Catalogue
from study.config import TrialConfig
from study.data import load_corpus
from study.storage import Storage
from study.traces import read_trace
from study.train import train

ROOT = Path(__file__).parent.parent
# A training small enough that its clocks, not its arithmetic, take the time.
TINY = """
trial:
  model: {d_model: 16, num_layers: 2, num_heads: 2, context_length: 16}
  optimizer: {name: adamw, lr: 1.0e-2}
  batch_size: 4
  steps: STEPS
arms:
  - {label: "clip 1", clip.max_norm: 1.0}
  - {label: "zclip", clip: zclip}
search: {seeds: SEEDS}
flush_seconds: 0.2
checkpoint_seconds: 0.5
"""


def write_study(folder: Path, steps: int, seeds: int = 1) -> Path:
    """A study file of 2 * seeds tiny trials."""
    path = folder / "tiny.yaml"
    path.write_text(TINY.replace("STEPS", str(steps)).replace("SEEDS", str(seeds)))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "study" / "run.py"), *map(str, arguments)]


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The command, started in a process group of its own."""
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def run(*arguments: object, timeout: float = 600, **environment: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    process = start(*arguments, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def wait_for(happened: Callable[[], object], seconds: float = 300) -> None:
    """Wait until `happened()` is true; an assertion if it doesn't."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.05)


def workers_of(driver: int | None = None, title: str = "ray::ImplicitFunc") -> list[psutil.Process]:
    """Ray's worker processes that run a trial, below `driver` or anywhere."""
    found = psutil.Process(driver).children(recursive=True) if driver else psutil.process_iter()
    return [process for process in found if _title(process).startswith(title)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def catalogue_of(folder: Path) -> Catalogue:
    return Catalogue(f"sqlite:///{folder}/gradnorm.db")


def undisturbed(config: dict) -> dict[str, np.ndarray]:
    """The columns of a trial that nobody disturbed: on one thread here, or on its workers."""
    if config["workers"] > 1 and not torch.distributed.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(_undisturbed_rank, args=(folder, config), nprocs=config["workers"])
            return torch.load(f"{folder}/rows.pt", weights_only=False)
    torch.set_num_threads(1)
    trial = TrialConfig.model_validate(config)
    parts = [report.rows for report in train(trial, load_corpus(trial.data))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _undisturbed_rank(rank: int, folder: str, config: dict) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=config["workers"])
    rows = undisturbed(config)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    torch.distributed.destroy_process_group()


def assert_exact(folder: Path, run_id: str) -> None:
    """Every trace of the run equals, bit for bit, that of the trial trained without disturbance."""
    for trial in catalogue_of(folder).trials(run_id):
        assert trial["status"] == "finished", trial
        trace = read_trace(Storage(folder), run_id, trial["id"])
        assert not trace.unreadable
        for name, expected in undisturbed(trial["config"]).items():
            found = trace.numpy(name)
            assert found.tobytes() == expected.astype(found.dtype).tobytes(), (trial["id"], name)
        folder_of_parts = folder / run_id / trial["id"] / "trace"
        assert [path.name for path in folder_of_parts.iterdir()] == ["000000001.parquet"]

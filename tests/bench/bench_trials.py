"""Many short trials through one run: wall time, overhead a trial, the driver's memory.

    python tests/bench/bench_trials.py [NUM_TRIALS]

The overhead is what a trial costs beyond its training: the wall time of the run from the first trial's
start to the last one's end, times the cores, less the time of the same trainings in one process.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

STUDY = """
trial:
  model: {d_model: 16, num_layers: 2, num_heads: 2, context_length: 16}
  batch_size: 4
  steps: 20
space:
  optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
search: {algorithm: random, num_samples: NUMBER}
"""
CORES = 2
MOST_MEMORY = 2**30  # bytes of the driver


def main(number: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        study = folder / "many.yaml"
        study.write_text(STUDY.replace("NUMBER", str(number)))
        wall, memory = run(study, folder, number)
        trials, seconds = measured(folder)
        plain = plain_seconds(study)
    assert len(trials) == number and {trial["status"] for trial in trials} == {"finished"}, len(trials)
    assert memory < MOST_MEMORY, memory
    overhead = seconds * CORES / number - plain
    print(f"{number:,} trials of 20 steps on {CORES} cores, all in the catalogue")
    print(f"wall time {wall:.1f} s, from the first trial's start to the last one's end {seconds:.1f} s")
    print(f"a trial: {seconds / number * 1000:.0f} ms; its training alone {plain * 1000:.0f} ms of a core")
    print(f"overhead a trial: {overhead * 1000:.0f} ms of a core")
    print(f"driver's memory at most: {memory / 2**20:.0f} MiB")


def run(study: Path, folder: Path, number: int) -> tuple[float, int]:
    """Seconds that the command took, and the driver's largest resident size (bytes)."""
    command = [sys.executable, str(ROOT / "study" / "run.py"), str(study), "--storage", str(folder)]
    log = open(folder / "log", "w")  # noqa: SIM115 (the process writes it)
    began = time.monotonic()
    process = subprocess.Popen([*command, "--run-id", "many", "--max-concurrent", str(CORES)], stdout=log)
    driver, memory = psutil.Process(process.pid), 0
    while process.poll() is None:
        try:
            memory = max(memory, driver.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(0.5)
    status = process.wait()
    assert status == 0, (status, (folder / "log").read_text()[-2000:])
    return time.monotonic() - began, memory


def measured(folder: Path) -> tuple[list[dict], float]:
    """The trials of the run, and the seconds from the first start to the last end."""
    from study.catalogue import Catalogue

    trials = Catalogue(f"sqlite:///{folder}/gradnorm.db").trials("many")
    return trials, max(t["ended_at"] for t in trials) - min(t["started_at"] for t in trials)


def plain_seconds(study: Path, number: int = 20) -> float:
    """Seconds of one training in one thread of this process, without any recording."""
    import torch

    from study.config import load_study, trial_config
    from study.data import load_corpus
    from study.train import train

    torch.set_num_threads(1)
    config = trial_config(load_study(str(study)).trial, {})
    data = load_corpus(config.data)
    list(train(config, data))
    began = time.monotonic()
    for _ in range(number):
        list(train(config, data))
    return (time.monotonic() - began) / number


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)

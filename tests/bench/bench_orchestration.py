"""What going through Ray costs: eight trials by run.py against the same trainings in two plain processes.

    python tests/bench/bench_orchestration.py [--steps 1200]

Both take two cores, one torch thread a training. The run is timed from its first trial's start to its last
one's end, as the catalogue has them: Ray's start-up, some seconds a run, is left out; that of the two
workers is in it, and shown. The plain processes train four each, half of them before the run and half after
it, so that a machine that gets busier is so for both; they record nothing, and their imports are left out.
Goal: a ratio of 1.15 at most, on a machine that does nothing else.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

STUDY = """
trial:
  model: {d_model: 32, num_layers: 4, num_heads: 4, context_length: 32}
  steps: STEPS
search: {seeds: 8, max_concurrent: 2}
"""
CORES, TRIALS, GOAL = 2, 8, 1.15

# What a plain process runs: waits for a line, so that both begin at once, then trains its seeds.
PLAIN = """
import sys, time, torch
torch.set_num_threads(1)
from study.config import load_study, trial_config
from study.data import load_corpus
from study.train import train
study = load_study(sys.argv[1])
configs = [trial_config(study.trial, {"seed": int(seed)}) for seed in sys.argv[2:]]
data = load_corpus(configs[0].data)
print("ready", flush=True)
sys.stdin.readline()
began = time.time()
for config in configs:
    for report in train(config, data):
        pass
print(began, time.time(), flush=True)
"""


def plain_seconds(study: Path, first: int, last: int) -> float:
    seeds = [[str(seed) for seed in range(first + core, last, CORES)] for core in range(CORES)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN, str(study), *some], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for some in seeds
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    times = [[float(word) for word in process.communicate()[0].split()] for process in processes]
    return max(end for _, end in times) - min(began for began, _ in times)


def run_seconds(study: Path, folder: Path) -> tuple[float, float, float]:
    """Seconds from the first trial's start to the last one's end, of the workers' start, and of it all."""
    from study.catalogue import Catalogue

    command = [sys.executable, str(ROOT / "study" / "run.py"), str(study), "--storage", str(folder)]
    began = time.monotonic()
    done = subprocess.run([*command, "--run-id", "eight"], capture_output=True, text=True)
    whole = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    trials = Catalogue(f"sqlite:///{folder}/gradnorm.db").trials("eight")
    assert [trial["status"] for trial in trials] == ["finished"] * TRIALS
    # The first two wait for their workers, which the others find there.
    took = [t["ended_at"] - t["started_at"] for t in sorted(trials, key=lambda t: t["started_at"])]
    starting = max(0.0, statistics.median(took[:CORES]) - statistics.median(took[CORES:]))
    return max(t["ended_at"] for t in trials) - min(t["started_at"] for t in trials), starting, whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1200)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        study = folder / "eight.yaml"
        study.write_text(STUDY.replace("STEPS", str(steps)))
        plain = plain_seconds(study, 0, TRIALS // 2)
        orchestrated, starting, whole = run_seconds(study, folder)
        plain += plain_seconds(study, TRIALS // 2, TRIALS)
    ratio = orchestrated / plain
    load = os.getloadavg()[1]
    print(f"{TRIALS} trials of {steps:,} steps, {CORES} at once, on {os.cpu_count()} cores; load {load:.1f}")
    print(f"two plain processes          {plain:7.1f} s")
    print(f"run.py, first start to end   {orchestrated:7.1f} s   (the whole command {whole:.1f} s)")
    print(f"of it the workers' start     {starting:7.1f} s")
    print(f"ratio                        {ratio:7.2f}     goal at most {GOAL}")


if __name__ == "__main__":
    main()

"""What it costs to record everything at period 10: the CPU time of a step, over one with core columns only.

    python tests/bench/bench_step.py [--blocks 20]

Two trials of the preset `figure` in one process, taking turns block by block, so that whatever else
the machine does hits both. Target: a ratio of at most 1.10.
"""

import argparse
import time

import numpy as np
import torch

from study.config import load_study, trial_config
from study.data import load_corpus
from study.train import Trial

PERIOD, TARGET = 10, 1.10


def block_seconds(trial: Trial) -> float:
    """CPU seconds of one block: each step once sampled, the others not, and a flush."""
    began = time.process_time()
    for _ in range(PERIOD):
        trial.run_step()
    trial.recorder.flush()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    study, data = load_study("figure"), load_corpus("stdlib")
    everything = {"record.period": PERIOD} | {
        f"record.{name}": True for name in ("grad_norms", "update_ratios", "activations")
    }
    trials = [
        Trial(trial_config(study.trial, overrides), data, torch.device("cpu"))
        for overrides in ({}, everything)
    ]
    for trial in trials:
        block_seconds(trial)
    seconds = np.empty((options.blocks, 2))
    for block in range(options.blocks):
        order = (0, 1) if block % 2 == 0 else (1, 0)  # whoever comes second finds warmer caches
        for number in order:
            seconds[block, number] = block_seconds(trials[number])
    core, full = np.median(seconds, axis=0) / PERIOD * 1e3
    ratios = seconds[:, 1] / seconds[:, 0]
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(f"core columns       {core:8.2f} ms a step")
    print(f"everything         {full:8.2f} ms a step, sampled every {PERIOD} steps")
    spread = f"quartiles {low:.3f} to {high:.3f}; target {TARGET:.2f}"
    print(f"ratio              {np.median(ratios):8.3f} ({spread})")


if __name__ == "__main__":
    main()

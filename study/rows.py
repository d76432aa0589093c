"""What a driver writes into the catalogue when a run begins, and how it signs it."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.estimates import Estimate
from study.objectives import notes_of
from study.space import Plan

PACKAGES = (
    "torch",
    "ray",
    "optuna",
    "numpy",
    "pyarrow",
    "transformers",
    "datasets",
    "tokenizers",
    "gradnorm-study",
)


@dataclass(frozen=True)
class Job:
    """A trial that is to be run, with what is known of it beforehand."""

    plan: Plan
    estimate: Estimate


def run_row(study: StudyConfig, run_id: str, storage: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    """The catalogue's row of a new run."""
    now = time.time()
    return {
        "id": run_id,
        "study": study.name,
        "status": "running",
        "created_at": now,
        "heartbeat": now,
        "storage": storage,
        "host": driver_name(),
        "git_commit": _git_commit(),
        "versions": _versions(),
        "config": study.model_dump(),
        "data": data,
        "notes": notes_of(study),
    }


def trial_row(job: Job, run_id: str) -> dict[str, Any]:
    """The catalogue's row of a trial that waits."""
    plan = job.plan
    return {
        "id": plan.trial_id(run_id),
        "run_id": run_id,
        "number": plan.number,
        "arm": plan.arm,
        "arm_number": plan.arm_number,
        "seed": plan.config.seed,
        "status": "pending",
        "step": 0,
        "num_steps": plan.config.steps,
        "attempts": 0,
        "num_parameters": job.estimate.num_parameters,
        "config": plan.config.model_dump(),
        "overrides": plan.overrides,
        "notes": job.estimate.notes,
    }


def driver_name() -> str:
    """Host and process of this driver: what `is_driving` looks for."""
    return f"{platform.node()} (process {os.getpid()})"


def is_driving(run: dict[str, Any]) -> bool:
    """Whether a driver is alive that owns the run: by its heartbeat, on its own host by its process."""
    if run["status"] not in ("pending", "running"):
        return False
    host, _, process = (run["host"] or "").partition(" (process ")
    if host != platform.node() or not process:
        return True
    try:
        os.kill(int(process.rstrip(")")), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

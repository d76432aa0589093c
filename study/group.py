"""One trial on several workers: Ray Train starts its ranks, torch.distributed joins them.

Tune's own process for the trial takes no resources: it waits, and hands on what the first rank tells.
A rank that dies takes the others with it, and all start again from the last checkpoint.
"""

import os
from typing import Any

# How soon a report is taken over; a rank can't go on with its next one before. Ray's default is 2 s.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

import ray.train
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from study.storage import Storage
from study.worker import train_trial


def train_group(job: dict[str, Any]) -> None:
    """Train a trial on its workers, each taking job["resources"]; returns when it has ended."""
    storage = Storage(job["storage"])
    resources = job["resources"]
    trainer = TorchTrainer(
        train_rank,
        train_loop_config=job,
        scaling_config=ray.train.ScalingConfig(
            num_workers=job["trial"]["workers"],
            use_gpu=bool(resources.get("GPU")),
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name="train",
            storage_path=storage.path(f"{job['run_id']}/{job['trial_id']}"),
            storage_filesystem=None if storage.is_local else storage.fs,
            failure_config=ray.train.FailureConfig(max_failures=job["max_failures"]),
            callbacks=[TuneReportCallback()],  # type: ignore[list-item]
        ),
    )
    trainer.fit()


def train_rank(job: dict[str, Any]) -> None:
    """What runs on each worker."""
    train_trial(job, ray.train.report, rank=ray.train.get_context().get_world_rank())

"""The command behind `ray://`: it runs on the cluster, as a task, and what it prints comes here.

A driver of Tune has to be in the cluster; a laptop is not. So the project's code and the study file
travel as a runtime environment, and the same command is called there with `--address auto`.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from study.config import PRESETS, ConfigError, study_path
from study.runs import Place, plan_run

PASSED_ON = ("GRADNORM_", "AWS_", "PG")  # beginnings of environment variables
LEFT_AT_HOME = ("runs", ".venv", ".git", "build", "tests", "docs")  # and what .gitignore names


def run_behind_client(
    address: str,
    arguments: Sequence[str],
    place: Place,
    storage: str,
    study: str,
    overrides: list[str],
    profile: str | None,
    resume: str | None,
) -> int:
    """The exit status of the command, called with `arguments`, on the cluster at `address`.

    What can be refused here is refused here. Ctrl-C interrupts it there. Raises ConfigError.
    """
    if place.storage.is_local and not os.path.isabs(os.path.expanduser(storage.removeprefix("file://"))):
        raise ConfigError(
            f"storage '{storage}' is a folder of this machine; known: an absolute path that "
            "all nodes share, or a URI such as s3://bucket/prefix (--storage)"
        )
    if resume is None:
        plan_run(study, overrides, profile)
    root = Path(__file__).resolve().parent.parent
    path = study_path(study)
    file = None if path.parent == PRESETS or resume is not None else (study, path.read_text(encoding="utf-8"))
    environment = {
        "working_dir": str(root),
        "excludes": list(LEFT_AT_HOME),
        "env_vars": {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)},
    }
    try:
        ray.init(address, runtime_env=environment, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"no Ray cluster at '{address}': {' '.join(str(error).split())} (--address)"
        ) from error
    driver: Any = ray.remote(_Whereabouts).options(num_cpus=0).remote()
    command = ray.remote(_command).options(num_cpus=0, max_retries=0)
    task = command.remote(_without_address(arguments), file, driver)
    try:
        return int(ray.get(task))
    except KeyboardInterrupt:
        # Ray's own cancelling would end the process in the middle of it; this is a Ctrl-C there.
        node, process = ray.get(driver.tell.remote())
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(_interrupt).options(num_cpus=0, scheduling_strategy=there).remote(process)
        return int(ray.get(task, timeout=120))
    finally:
        ray.shutdown()


class _Whereabouts:
    """On the cluster: which process on which node the command runs in."""

    def __init__(self) -> None:
        self.place = ("", 0)

    def note(self, node: str, process: int) -> None:
        self.place = (node, process)

    def tell(self) -> tuple[str, int]:
        return self.place


def _interrupt(process: int) -> None:
    os.kill(process, signal.SIGINT)


def _without_address(arguments: Sequence[str]) -> list[str]:
    words = iter(arguments)
    return [
        word
        for word in words
        if not word.startswith("--address=") and not (word == "--address" and next(words))
    ]


def _command(arguments: list[str], file: tuple[str, str] | None, driver: Any) -> int:
    """On the cluster: the command line, with the study file written where this process can read it."""
    from study.run import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers don't hear it
    ray.get(driver.note.remote(ray.get_runtime_context().get_node_id(), os.getpid()))
    if file is not None:
        name, text = file
        copy = Path(tempfile.mkdtemp()) / Path(name).name
        copy.write_text(text, encoding="utf-8")
        arguments = [str(copy) if word == name else word for word in arguments]
    try:
        app([*arguments, "--address", "auto"])
    except SystemExit as end:
        return int(end.code or 0)
    return 0

"""Chaos: workers, raylets and drivers killed at random moments; every trace comes out exact.

Short in `make test`; `make chaos` is the long form: 8 trials on two raylets, 20 kills. The moments
come from GRADNORM_CHAOS_SEED, which a failure prints.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from driving import assert_exact, catalogue_of, start, workers_of, write_study
from servers import free_port

LONG = os.environ.get("GRADNORM_CHAOS") == "long"
SEED = int(os.environ.get("GRADNORM_CHAOS_SEED", "7"))
NUM_KILLS = 20 if LONG else 3
SEEDS, STEPS = (4, 4000) if LONG else (1, 1500)
VICTIMS = ["worker", "raylet", "driver"]
SECONDS_BETWEEN = (2.0, 10.0) if LONG else (3.0, 6.0)


class TwoRaylets:
    """A head and a second raylet on this machine, one core each, small object stores."""

    def __init__(self, folder: Path, *head: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_TOKEN": "a" * 32,
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        head = head or ("--include-dashboard=false",)
        self._start("--head", f"--port={self.port}", f"--temp-dir={folder}/ray", *head)
        self.add_raylet()

    def _start(self, *arguments: str) -> None:
        command = [Path(sys.executable).parent / "ray", "start", "--block", "--num-cpus=1", *arguments]
        log = open(self.folder / f"node{len(self.nodes)}.log", "wb")  # noqa: SIM115 (the process owns it)
        process = subprocess.Popen(
            [*command, f"--object-store-memory={100 * 2**20}"],
            env=self.environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.nodes.append(process)
        deadline = time.monotonic() + 180
        while "Ray runtime started" not in Path(log.name).read_text(errors="replace"):
            assert time.monotonic() < deadline and process.poll() is None, Path(log.name).read_text()
            time.sleep(0.2)

    def add_raylet(self) -> None:
        self._start(f"--address={self.address}")

    def kill_raylet(self) -> bool:
        """Kill the newest raylet that isn't the head's, and start another."""
        for process in psutil.Process(self.nodes[-1].pid).children(recursive=True):
            if process.name() == "raylet":
                process.kill()
                break
        os.killpg(self.nodes[-1].pid, signal.SIGKILL)
        self.add_raylet()
        return True

    def stop(self) -> None:
        for node in self.nodes:
            children = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            for process in children:
                process.kill()
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRaylets]:
    raylets = TwoRaylets(tmp_path_factory.mktemp("c"))
    yield raylets
    raylets.stop()


def drive(cluster: TwoRaylets, *arguments: object) -> "subprocess.Popen[str]":
    keys = ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")
    tokens = {key: cluster.environment[key] for key in keys}
    return start(*arguments, "--address", cluster.address, **tokens)


@pytest.mark.ray
@pytest.mark.slow
def test_traces_are_exact_after_chaos(cluster: TwoRaylets, tmp_path: Path) -> None:
    moments = random.Random(SEED)
    study = write_study(tmp_path, STEPS, SEEDS)
    driver = drive(cluster, study, "--storage", tmp_path, "--run-id", "chaos", "--set", "max_failures=50")
    killed: list[str] = []
    while len(killed) < NUM_KILLS:
        time.sleep(moments.uniform(*SECONDS_BETWEEN))
        victim = VICTIMS[len(killed) % 3] if len(killed) < 3 else moments.choice(VICTIMS)
        if driver.poll() is not None:
            break
        if victim == "driver" and catalogue_of(tmp_path).has_database():
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            driver = drive(cluster, "--resume", "chaos", "--storage", tmp_path)
        elif victim == "raylet":
            cluster.kill_raylet()
        elif victim == "worker":
            workers = workers_of()
            if not workers:
                continue
            moments.choice(workers).kill()
        killed.append(victim)
    for _ in range(3):
        output, _ = driver.communicate(timeout=600)
        if driver.returncode == 0:
            break
        driver = drive(cluster, "--resume", "chaos", "--storage", tmp_path)
    assert driver.returncode == 0, f"seed {SEED}, killed {killed}:\n{output}"
    print(f"seed {SEED}: killed {killed}")
    assert_exact(tmp_path, "chaos")

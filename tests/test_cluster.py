"""Joining a cluster that somebody else runs: what is refused is refused at once, before a run is made."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from driving import ROOT, assert_exact, catalogue_of, command, run, start, wait_for, write_study
from servers import free_port
from test_chaos import TwoRaylets

KEYS = ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")
# Lets the cluster say that it runs another version: what Ray's own check reads.
OTHER_VERSION = """
import json, sys, ray
ray.init(sys.argv[1])
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
told = json.loads(_internal_kv_get(b"CLUSTER_METADATA", namespace=KV_NAMESPACE_CLUSTER))
print(json.dumps(told))
told["ray_version"] = "2.50.1"
_internal_kv_put(b"CLUSTER_METADATA", json.dumps(told).encode(), True, namespace=KV_NAMESPACE_CLUSTER)
"""


class Head(TwoRaylets):
    """One node only."""

    def add_raylet(self) -> None:
        pass


class JobServer(TwoRaylets):
    """Two nodes, and the dashboard that takes jobs."""

    def __init__(self, folder):
        self.dashboard = free_port()
        head = "--include-dashboard=true", f"--dashboard-port={self.dashboard}"
        super().__init__(folder, *head, f"--dashboard-agent-listen-port={free_port()}")

    def add_raylet(self) -> None:
        # In one folder each would unpack the job's code over the other's, as on no two machines.
        own = f"--temp-dir={self.folder}/ray2", f"--dashboard-agent-listen-port={free_port()}"
        self._start(f"--address={self.address}", *own)


def environment(cluster, **values):
    return os.environ | {key: cluster.environment[key] for key in KEYS} | values


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    cluster = Head(tmp_path_factory.mktemp("h"))
    yield cluster
    cluster.stop()


def refused(tmp_path, address, env):
    """The error with which the command ends; it has made no run."""
    words = command(write_study(tmp_path, 20), "--storage", tmp_path / "runs", "--address", address)
    ran = subprocess.run(words, check=False, capture_output=True, text=True, env=env, timeout=300)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert not (tmp_path / "runs" / "gradnorm.db").exists()
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_an_address_where_nothing_listens_is_refused_at_once(tmp_path):
    began = time.monotonic()
    line = refused(tmp_path, "127.0.0.1:1", dict(os.environ))
    assert "no Ray cluster at '127.0.0.1:1'" in line and "refused" in line and "--address" in line
    assert time.monotonic() - began < 100  # Ray alone tries for minutes


def test_behind_rays_client_a_folder_of_this_machine_is_refused(tmp_path):
    words = command(write_study(tmp_path, 20), "--storage", "runs", "--address", "ray://127.0.0.1:10001")
    ran = subprocess.run(words, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ran.returncode == 2 and "storage 'runs' is a folder of this machine" in ran.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_behind_rays_client_the_command_runs_on_the_cluster(tmp_path_factory, tmp_path):
    """From a laptop: bad input is refused here, the study travels, Ctrl-C reaches it, a resume ends it."""
    port = free_port()
    head = "--include-dashboard=false", f"--ray-client-server-port={port}"
    cluster = Head(tmp_path_factory.mktemp("b"), *head)
    try:
        place = ["--storage", tmp_path / "runs", "--address", f"ray://127.0.0.1:{port}"]
        study = write_study(tmp_path, steps=2000)
        tokens = {key: cluster.environment[key] for key in KEYS}
        status, output = run(study, *place, "--set", "trial.step=3", timeout=200, **tokens)
        assert status == 2 and "did you mean 'steps'?" in output
        process = start(study, *place, "--run-id", "far", **tokens)
        wait_for(lambda: list(tmp_path.glob("runs/far/*/checkpoint/*.pt")) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 130, output
        assert "run far: 2 trials of study tiny" in output and "far was interrupted" in output
        status, output = run("--resume", "far", *place, timeout=300, **tokens)
        assert status == 0, output
    finally:
        cluster.stop()
    assert_exact(tmp_path / "runs", "far")


@pytest.mark.ray
@pytest.mark.slow
def test_a_wrong_token_is_refused_and_the_token_is_named_as_a_reason(head, tmp_path):
    line = refused(tmp_path, head.address, environment(head, RAY_AUTH_TOKEN="b" * 32))
    assert "RAY_AUTH_TOKEN" in line and "b" * 32 not in line


@pytest.mark.ray
@pytest.mark.slow
def test_another_version_is_refused_with_both_versions_named(head, tmp_path):
    env = environment(head)
    told = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION, head.address],
        check=True, capture_output=True, text=True, env=env, timeout=200,
    )  # fmt: skip
    ours = json.loads(told.stdout)["ray_version"]
    line = refused(tmp_path, head.address, env)
    assert "2.50.1" in line and ours in line


@pytest.mark.ray
@pytest.mark.slow
def test_a_submitted_job_brings_its_code_to_two_nodes(tmp_path_factory, tmp_path):
    """`ray job submit --working-dir`: the nodes have the packages, not the project."""
    cluster = JobServer(tmp_path_factory.mktemp("j"))
    try:
        code = tmp_path / "code"
        for package in ("models", "study"):
            shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
        write_study(code, steps=600)
        submit = [Path(sys.executable).parent / "ray", "job", "submit"]
        submit += ["--address", f"http://127.0.0.1:{cluster.dashboard}", "--working-dir", code, "--"]
        submit += [
            sys.executable,
            "study/run.py",
            "tiny.yaml",
            "--address",
            "auto",
            "--storage",
            tmp_path / "runs",
        ]
        for _ in range(20):
            ran = subprocess.run(
                submit, check=False, capture_output=True, text=True, timeout=400,
                env=environment(cluster, PYTHONPATH=""), cwd=tmp_path,
            )  # fmt: skip
            if "No available agent" not in ran.stderr:  # it comes up after the node itself
                break
            time.sleep(2)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    finally:
        cluster.stop()
    row = catalogue_of(tmp_path / "runs").run("latest")
    assert row is not None and row["status"] == "finished"
    assert_exact(tmp_path / "runs", row["id"])

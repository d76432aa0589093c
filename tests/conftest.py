"""A tiny real store for tests of what reads: a catalogue and traces as a driver leaves them."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sqlalchemy as sa
from servers import ObjectStore, PostgreSQL, postgresql

from study import catalogue as tables
from study.catalogue import Catalogue
from study.storage import Storage
from study.traces import TraceWriter

if TYPE_CHECKING:
    from study.config import TrialConfig
    from study.data import Tokens

ARMS = (
    ("Pre-Norm | Gradient Clip=10 | Run 1", "pre", 10.0),
    ("Pre-Norm | Gradient Clip=1 | Run 2", "pre", 1.0),
    ("Post-Norm | DeepNorm | Gradient Clip=1", "deepnorm", 1.0),
    ("Pre-Norm | Attn. Relax | Gradient Clip=1", "pre", 1.0),
)


def trial_config(block: str, max_norm: float, seed: int, steps: int) -> dict[str, Any]:
    """A resolved trial as the driver stores it."""
    return {
        "model": {
            "d_model": 48, "num_layers": 2, "context_length": 48, "causal": True,
            "norm": {"name": "layer"}, "block": {"name": block}, "relaxation": {"name": "none"},
        },
        "clip": {"name": "global_norm", "max_norm": max_norm},
        "optimizer": {"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.95]},
        "precision": "fp32", "batch_size": 8, "steps": steps, "seed": seed,
    }  # fmt: skip


@dataclass
class TinyStore:
    """A storage folder with its catalogue; `add_run` puts a run into both."""

    folder: Path
    storage: Storage = field(init=False)
    catalogue: Catalogue = field(init=False)

    def __post_init__(self) -> None:
        self.storage = Storage(self.folder)
        self.catalogue = Catalogue(f"sqlite:///{self.folder / 'gradnorm.db'}")
        self.catalogue.migrate()

    def add_run(
        self,
        run_id: str,
        *,
        steps: int = 60,
        seeds: int = 1,
        arms: int = 4,
        status: str = "finished",
        study: str = "figure",
        created_at: float | None = None,
        traces: dict[tuple[int, int], dict[str, Any]] | None = None,
        **trial_values: Any,
    ) -> list[str]:
        """A run of `arms` x `seeds` trials; `traces` replaces columns of (arm, seed). Its trials' ids."""
        # What has ended did so an hour ago: then its answers may be kept for ever.
        now = created_at or time.time() - (3600 if status == "finished" else 0)
        rows = []
        for arm in range(arms):
            label, block, max_norm = ARMS[arm % len(ARMS)]
            for seed in range(seeds):
                number = len(rows)
                trial_id = f"{run_id}_{number:05d}"
                random = np.random.default_rng(number)
                norms = (1 + arm) * np.exp(0.1 * random.standard_normal(steps))
                columns = {
                    "step": np.arange(1, steps + 1),
                    "loss": 5 - np.log1p(np.arange(steps)) / 2 + 0.01 * random.standard_normal(steps),
                    "grad_norm": norms,
                    "grad_norm_clipped": np.minimum(norms, max_norm),
                    "lr": np.full(steps, 1e-2),
                    "clip_threshold": np.full(steps, max_norm),
                    "skipped": np.zeros(steps, bool),
                    **(traces or {}).get((arm, seed), {}),
                }
                length = len(columns["step"])
                columns = {name: values[:length] for name, values in columns.items()}
                if length:
                    writer = TraceWriter(self.storage, run_id, trial_id)
                    writer.append(columns)
                bad = np.flatnonzero(~np.isfinite(columns["grad_norm"]))
                diverged = bool(len(bad)) and status == "finished"
                rows.append(
                    {
                        "id": trial_id, "run_id": run_id, "number": number, "arm": label, "arm_number": arm,
                        "seed": seed, "status": "diverged" if diverged else status,
                        "reason": "nonfinite_grad" if diverged else None,
                        "diverged_step": int(bad[0]) + 1 if diverged else None,
                        "step": length, "num_steps": steps, "loss": 2.0 + arm / 10, "grad_norm": 1.0 + arm,
                        "steps_per_second": 30.0, "started_at": now, "heartbeat": now,
                        "ended_at": now + 9 if status == "finished" else None, "attempts": 1,
                        "num_parameters": 1000, "config": trial_config(block, max_norm, seed, steps),
                        "overrides": {"clip.max_norm": max_norm}, "notes": [], "summary": {}, "error": None,
                        **trial_values,
                    }
                )  # fmt: skip
        run = {
            "id": run_id, "study": study, "status": status, "created_at": now, "heartbeat": now,
            "ended_at": now + 9 if status == "finished" else None, "storage": self.storage.uri,
            "config": {"name": study, "arms": [], "claims": []},
        }  # fmt: skip
        self.catalogue.add_run(run, rows)
        return [row["id"] for row in rows]

    def change(
        self, run_id: str, run: dict[str, Any] | None = None, trials: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Set columns of a run and of its trials, as a driver does while it goes on."""
        with self.catalogue.engine.begin() as connection:
            if run:
                connection.execute(sa.update(tables.runs).where(tables.runs.c.id == run_id).values(**run))
            for trial_id, values in (trials or {}).items():
                chosen = tables.trials.c.id == trial_id
                connection.execute(sa.update(tables.trials).where(chosen).values(**values))


@pytest.fixture
def store(tmp_path: Path) -> TinyStore:
    """An empty store; its catalogue is migrated."""
    return TinyStore(tmp_path / "runs")


@pytest.fixture
def client_at():
    """A client of a service over a folder: `client_at(folder, **settings)`."""
    from starlette.testclient import TestClient

    from service.app import create_app
    from service.settings import Settings

    with ExitStack() as stack:

        def enter(folder: Path, **values: Any) -> TestClient:
            app = create_app(Settings(storage=str(folder), log_level="error", **values))
            return stack.enter_context(TestClient(app))

        yield enter


@pytest.fixture
def client_of(client_at):
    """A client of a service over a tiny store: `client_of(store, **settings)`."""
    return lambda store, **values: client_at(store.folder, **values)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    """A throw-away PostgreSQL; skipped where none is installed."""
    with postgresql() as server:
        yield server


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """An empty S3, to which this test's environment leads."""
    server = ObjectStore()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'gradnorm.db'}"
    return request.getfixturevalue("postgresql_server").new_database()


@pytest.fixture(scope="session")
def shrink() -> Callable[..., "TrialConfig"]:
    """The figure's trial, cut down to milliseconds a step; dotted overrides on top, as an arm has them."""
    import torch

    from study.config import load_study
    from study.config import trial_config as resolve

    torch.set_num_threads(1)  # one order of summation, so that bits can be compared
    small = {
        "model.d_model": 16, "model.num_layers": 2, "model.num_heads": 2, "model.context_length": 12,
        "schedule.warmup_steps": 4, "batch_size": 4, "steps": 20,
    }  # fmt: skip
    figure = load_study("figure")

    def shrunk(overrides: dict[str, Any] | None = None, **settings: Any) -> "TrialConfig":
        return resolve(figure.trial, small | settings | (overrides or {}), "test")

    return shrunk


@pytest.fixture(scope="session")
def text() -> "Tokens":
    """A small corpus of real text: one file of the standard library, as bytes."""
    from study.data import load_corpus

    return load_corpus({"name": "text", "path": argparse.__file__})

"""Every placement with every relaxation and clip trains on the corpus, finite, and resumes exactly."""

import copy
import itertools

import numpy as np
import pytest
import torch

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.clipping import CLIPS
from models.guards import GUARDS
from models.norms import NORMS
from models.optimizers import OPTIMIZERS
from study.config import ConfigError, TrialConfig, trial_config
from study.data import Tokens, load_corpus
from study.estimates import estimate
from study.train import train

SMALL = {
    "model": {"d_model": 16, "num_layers": 2, "num_heads": 2, "context_length": 8},
    "optimizer": {"lr": 1e-3},
    "batch_size": 2,
    "steps": 20,
}
NORM_OF = {"ngpt": "none", "rezero": "none"}  # they have no other


@pytest.fixture(scope="module")
def corpus() -> Tokens:
    torch.set_num_threads(1)
    return load_corpus("stdlib")


def trace(config: TrialConfig, corpus: Tokens, state: dict | None = None) -> tuple[dict, dict | None]:
    """Columns of a trial from `state` on, and its state after the first report of at least ten steps."""
    parts, middle = [], None
    for report in train(config, corpus, state=state, flush_seconds=0.0 if state is None else 9.0):
        parts.append(report.rows)
        if middle is None and report.step >= 10 and report.status == "running":
            middle = {"step": report.step, "copy": copy.deepcopy(report.state())}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, middle


def assert_trains_and_resumes(corpus: Tokens, **overrides: object) -> None:
    block = str(overrides.get("model.block", "pre"))
    settings = {"model.norm": NORM_OF.get(block, "layer")} | overrides
    config = trial_config(SMALL, settings, "test")
    whole, middle = trace(config, corpus)
    assert whole["step"].tolist() == list(range(1, 21))
    assert np.isfinite(whole["loss"]).all() and np.isfinite(whole["grad_norm"]).all()
    assert middle is not None
    rest, _ = trace(config, corpus, middle["copy"])
    for name, values in rest.items():
        assert values.tobytes() == whole[name][middle["step"] :].tobytes(), name


@pytest.mark.parametrize(("block", "relaxation"), list(itertools.product(BLOCKS, RELAXATIONS)))
def test_placement_with_relaxation(block: str, relaxation: str, corpus: Tokens) -> None:
    overrides = {"model.block": block, "model.relaxation": relaxation}
    try:
        assert_trains_and_resumes(corpus, **overrides)
    except ConfigError as error:
        assert "(test: model" in str(error), error  # refused, with the reason


@pytest.mark.parametrize(("block", "clip"), list(itertools.product(BLOCKS, CLIPS)))
def test_placement_with_clip(block: str, clip: str, corpus: Tokens) -> None:
    assert_trains_and_resumes(corpus, **{"model.block": block, "clip": clip})


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("guard", GUARDS)
def test_norm_with_guard(norm: str, guard: str, corpus: Tokens) -> None:
    assert_trains_and_resumes(corpus, **{"model.norm": norm, "guard": guard})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_with_reset(optimizer: str, corpus: Tokens) -> None:
    reset = {"name": "momentum_reset", "period": 7, "warmup_steps": 3}
    assert_trains_and_resumes(corpus, optimizer={"name": optimizer}, reset=reset)


def test_combinations_that_make_no_sense_are_refused_with_the_reason(corpus: Tokens) -> None:
    with pytest.raises(ConfigError, match="ngpt"):
        config = trial_config(SMALL, {"model.block": "ngpt", "model.norm": "rms"}, "test")
        estimate(config, corpus)

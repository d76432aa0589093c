"""What a trial will need is known before it runs, and what can't be run is refused by then."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from study.config import ConfigError, TrialConfig
from study.data import Tokens
from study.estimates import estimate
from study.train import Trial

Shrink = Callable[..., TrialConfig]


@pytest.mark.parametrize(
    "overrides",
    [{}, {"model.tie_embeddings": True}, {"model.causal": False}, {"model.block": "deepnorm"}],
    ids=str,
)
def test_parameters_are_counted_as_the_trial_has_them(
    shrink: Shrink, text: Tokens, overrides: dict[str, Any]
) -> None:
    config = shrink(overrides)
    trial = Trial(config, text, torch.device("cpu"))
    assert estimate(config, text).num_parameters == sum(p.numel() for p in set(trial.model.parameters()))


def test_a_model_of_a_billion_parameters_is_counted_without_being_built(shrink: Shrink, text: Tokens) -> None:
    config = shrink({"model.d_model": 2048, "model.num_layers": 24, "model.num_heads": 16})
    found = estimate(config, text)
    assert found.num_parameters > 1e9
    assert found.memory > 16 * found.num_parameters  # weights, gradients, two moments in float32


def test_memory_grows_with_the_micro_batch_and_with_scores_that_are_kept(
    shrink: Shrink, text: Tokens
) -> None:
    def memory(**overrides: Any) -> int:
        return estimate(shrink(overrides | {"model.context_length": 64}), text).memory

    assert memory(batch_size=16) > memory(batch_size=8) == memory(batch_size=16, accumulate=2)
    assert memory(**{"model.num_layers": 4}) > memory()
    explicit = memory(**{"model.relaxation": "pb_relax"})
    assert explicit > memory() and explicit == memory(**{"model.scores": "float16"})
    assert memory(precision="bf16") < memory()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"model.relaxation": "pb_relax"}, r"pb_relax \(alpha 32\) equals none in exact arithmetic"),
        (
            {"model.relaxation": {"name": "pb_relax", "form": "post_matmul"}, "model.scores": "float16"},
            "unprot",
        ),
    ],
)
def test_an_arm_that_changes_nothing_is_noted(
    shrink: Shrink, text: Tokens, overrides: dict[str, Any], says: str
) -> None:
    (note,) = estimate(shrink(overrides), text).notes
    assert re.search(says, note)
    assert estimate(shrink(), text).notes == []
    protective = {"model.relaxation": "pb_relax", "model.scores": "float16"}
    assert estimate(shrink(protective), text).notes == []


def test_a_corpus_that_is_too_small_is_known_before_the_run(shrink: Shrink) -> None:
    def refusal(num_tokens: int, **overrides: Any) -> str:
        tokens = Tokens(np.zeros(num_tokens, np.uint8), 256, {})
        with pytest.raises(ConfigError) as caught:
            estimate(shrink(overrides), tokens, "study.yaml")
        return str(caught.value)

    message = refusal(20, **{"validation.fraction": 0.0})
    assert message == (
        "a corpus of 20 tokens is too small for windows of 12; at least 25 are needed (study.yaml)"
    )
    # 5 % of 400 tokens are held out: too few to measure a loss on, if that is asked for
    assert "a corpus of 20 tokens is too small" in refusal(400, **{"validation.period": 5})
    estimate(shrink(), Tokens(np.zeros(400, np.uint8), 256, {}))
    # what is left for training counts, not the whole
    assert "a corpus of 20 tokens is too small" in refusal(40, **{"validation.fraction": 0.5})

"""One trial, step by step: what is recorded is what torch would say, and a resumed trial goes on exactly."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trial_runs import (
    NEVER,
    assert_same_bits,
    assert_same_state,
    reports_in_pieces,
    run,
    through_a_file,
    trace_of,
)

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.clipping import CLIPS
from models.guards import GUARDS
from models.optimizers import OPTIMIZERS
from models.resets import RESETS
from models.transformer import ModelConfig, Transformer
from study import train as train_module
from study.config import TrialConfig, load_study
from study.data import Batches, Tokens, load_corpus
from study.space import plan_trials
from study.train import Trial, train

Shrink = Callable[..., TrialConfig]
CPU = torch.device("cpu")
CORE = ["step", "loss", "grad_norm", "grad_norm_clipped", "clip_threshold", "skipped", "loss_scale", "lr"]


@pytest.mark.parametrize("flush_seconds", [0, 0.02, NEVER])
@pytest.mark.parametrize("steps", [1, 2, 23])
def test_a_trace_of_n_steps_has_exactly_the_steps_1_to_n(
    shrink: Shrink, text: Tokens, steps: int, flush_seconds: float
) -> None:
    reports = list(train(shrink(steps=steps), text, flush_seconds=flush_seconds))
    assert trace_of(reports)["step"].tolist() == list(range(1, steps + 1))
    assert [report.status for report in reports] == ["running"] * (len(reports) - 1) + ["finished"]
    assert [report.step for report in reports] == [report.rows["step"][-1] for report in reports]
    assert (reports[-1].reason, reports[-1].diverged_step) == (None, None)
    assert set(reports[0].rows) == set(CORE)
    if flush_seconds == 0:
        assert len(reports) == steps


def test_rows_never_wait_for_more_than_a_bounded_number_of_steps(
    shrink: Shrink, text: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "MAX_ROWS", 7)
    reports = list(train(shrink(), text, flush_seconds=NEVER))
    lengths = [len(report.rows["step"]) for report in reports]
    assert max(lengths) <= 7 and sum(lengths) == 20
    assert_same_bits(trace_of(reports), run(shrink(), text, flush_seconds=0))


def plain_loop(config: TrialConfig, data: Tokens, decays: bool = True) -> dict[str, list[float]]:
    """The training loop that everybody writes, on the same model, batches and steps."""
    torch.manual_seed(config.seed)
    model = Transformer(replace(config.model, vocab_size=256))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    held_out = int(len(data.tokens) * 0.05)
    batches = Batches(data.tokens[:-held_out], config.model.context_length, config.batch_size, config.seed)
    columns: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": []}
    for step in range(1, config.steps + 1):
        tokens = torch.from_numpy(batches(step))
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip["max_norm"])
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, step / 4)
        optimizer.step()
        for name, value in zip(columns, (loss.item(), norm.item(), group["lr"]), strict=True):
            columns[name].append(value)
    return columns


@pytest.mark.parametrize("arm", range(4))
def test_loss_and_norm_are_those_of_torch_on_the_same_steps_to_the_bit(
    shrink: Shrink, text: Tokens, arm: int
) -> None:
    """Every arm of the figure against torch.nn.utils.clip_grad_norm_ in a loop of its own."""
    overrides = plan_trials(load_study("figure"))[arm].overrides
    config = shrink(overrides, seed=arm)
    trace = run(config, text)
    for name, values in plain_loop(config, text).items():
        np.testing.assert_array_equal(trace[name], np.array(values, np.float32), name)
    threshold, norm = config.clip["max_norm"], trace["grad_norm"]
    assert (norm > 1).any()  # so that the clip at 1 did something
    np.testing.assert_allclose(trace["grad_norm_clipped"], np.minimum(norm, threshold), rtol=2e-6)
    assert set(trace["clip_threshold"]) == {threshold} and not trace["skipped"].any()
    assert set(trace["loss_scale"]) == {1.0}


@pytest.mark.parametrize("overrides", [{}, {"precision": "fp16", "model.causal": False}], ids=str)
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(
    shrink: Shrink, text: Tokens, overrides: dict[str, Any]
) -> None:
    first = run(shrink(overrides), text)
    assert_same_bits(first, run(shrink(overrides), text, flush_seconds=0))
    other = run(shrink(overrides, seed=1), text)
    assert not np.array_equal(first["loss"], other["loss"])


EVERYTHING = {
    "record.period": 3, "record.grad_norms": True, "record.update_ratios": True, "record.activations": True,
    "validation.period": 4, "validation.batches": 2,
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"precision": "fp16"},  # overflows at step 11
    {"precision": "bf16", "accumulate": 2},
    {"model.causal": False, "accumulate": 4, "mask_fraction": 0.1},
    {"clip": "zclip", **EVERYTHING},
    {"precision": "fp16", "model.causal": False, "clip": "zclip", "accumulate": 2, **EVERYTHING},
    {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "schedule": "cosine"},
    {"reset": {"name": "momentum_reset", "period": 5, "warmup_steps": 3}},
]


def assert_resumes_exactly(config: TrialConfig, data: Tokens, ends: set[int]) -> None:
    """The trace and the final state are those of a trial that nobody disturbed."""
    straight = list(train(config, data, flush_seconds=NEVER))
    pieces = reports_in_pieces(config, data, ends)
    assert_same_bits(trace_of(straight), trace_of(pieces))
    assert_same_state(straight[-1].state(), pieces[-1].state())


@pytest.mark.parametrize("overrides", SETTINGS, ids=str)
def test_a_trial_that_dies_again_and_again_has_the_trace_of_one_that_never_did(
    shrink: Shrink, text: Tokens, overrides: dict[str, Any]
) -> None:
    assert_resumes_exactly(shrink(overrides, steps=12), text, {1, 2, 5, 9, 10, 11})


VARIANTS = [
    (key, name)
    for key, table in {
        "clip": CLIPS, "guard": GUARDS, "optimizer": OPTIMIZERS, "reset": RESETS,
        "model.block": BLOCKS, "model.relaxation": RELAXATIONS,
    }.items()
    for name in table
]  # fmt: skip


@pytest.mark.parametrize(("key", "name"), VARIANTS)
def test_every_variant_resumes_exactly(shrink: Shrink, text: Tokens, key: str, name: str) -> None:
    needs = {"model.norm": "none"} if key == "model.block" and BLOCKS[name].refuses(ModelConfig()) else {}
    assert_resumes_exactly(shrink({**needs, key: name}, steps=5), text, {3})


def test_a_trial_that_had_finished_says_so_again_and_records_nothing(shrink: Shrink, text: Tokens) -> None:
    *_, last = train(shrink(), text)
    (again,) = train(shrink(), text, state=through_a_file(last.state()))
    assert (again.status, again.rows, again.step) == ("finished", {}, 20)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_sum_to_the_whole_batch(shrink: Shrink, text: Tokens, parts: int, causal: bool) -> None:
    """Masked micro-batches differ in their number of targets: a mean of their means would be wrong."""
    overrides = {"model.causal": causal, "optimizer": {"name": "sgd", "lr": 0.1}}
    overrides |= {} if causal else {"mask_fraction": 0.2}
    whole = run(shrink(overrides), text)
    cut = run(shrink(overrides, accumulate=parts), text)
    for name in ("loss", "grad_norm", "grad_norm_clipped"):
        np.testing.assert_allclose(cut[name], whole[name], rtol=1e-4, err_msg=name)
    assert not np.array_equal(whole["grad_norm"], cut["grad_norm"])  # it did sum in parts


@pytest.mark.parametrize("alpha", [1, 2, 32])
def test_relaxation_in_fp32_changes_the_trace_by_rounding_alone(
    shrink: Shrink, text: Tokens, alpha: float
) -> None:
    plain = run(shrink(), text)
    relaxed = run(shrink({"model.relaxation": {"name": "pb_relax", "alpha": alpha}}), text)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(relaxed[name], plain[name], rtol=1e-3, err_msg=name)
        np.testing.assert_allclose(relaxed[name][:4], plain[name][:4], rtol=2e-5, err_msg=name)


def test_two_thresholds_above_every_norm_give_the_same_bits(shrink: Shrink, text: Tokens) -> None:
    loose, looser = (run(shrink({"clip.max_norm": threshold}), text) for threshold in (1e3, 1e6))
    none = run(shrink({"clip": "none"}), text)
    assert loose["grad_norm"].max() < 1e3
    assert_same_bits(loose, looser, but=("clip_threshold",))
    assert_same_bits(loose, none, but=("clip_threshold",))
    assert set(none["clip_threshold"]) == {math.inf}
    np.testing.assert_array_equal(loose["grad_norm"], loose["grad_norm_clipped"])


def test_two_thresholds_below_every_norm_are_one_training_under_adam_and_two_under_sgd(
    shrink: Shrink, text: Tokens
) -> None:
    def pair(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
        return [run(shrink({"clip.max_norm": c, "optimizer": optimizer}), text) for c in (1e-2, 3e-3)]

    adam = pair({"name": "adamw", "lr": 1e-2, "eps": 1e-20})
    assert min(trace["grad_norm"].min() for trace in adam) > 1e-2
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(adam[0][name], adam[1][name], rtol=2e-3, err_msg=name)
        np.testing.assert_allclose(adam[0][name][:4], adam[1][name][:4], rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(adam[0]["grad_norm_clipped"], 1e-2, rtol=1e-3)
    sgd = pair({"name": "sgd", "lr": 10.0})
    assert abs(sgd[0]["loss"] - sgd[1]["loss"]).max() > 0.1


DIVERGING = [
    ({"optimizer.lr": 1e10, "guard": "none"}, "nonfinite_loss", 2, 11),
    ({"optimizer.lr": 1e10}, "nonfinite_loss", 2, 11),
    ({"optimizer.lr": 1e3, "model.scores": "float16", "guard": "none"}, "nonfinite_loss", 2, 11),
    ({"optimizer.lr": 1e5, "patience": 3, "clip": "none"}, "nonfinite_grad", 2, 4),
    ({"optimizer.lr": 1e5, "patience": 1, "guard": "none"}, "nonfinite_grad", 2, 2),
    # 2^16 halved from step 2 on; 2^-14, the first below fairseq's floor of 1e-4, is what step 32 used
    ({"optimizer.lr": 1e3, "precision": "fp16", "patience": 100}, "loss_scale_floor", 32, 32),
]


@pytest.mark.parametrize(("overrides", "reason", "began", "ends"), DIVERGING, ids=str)
def test_a_trial_that_turns_nan_ends_as_diverged_with_reason_and_step(
    shrink: Shrink, text: Tokens, overrides: dict[str, Any], reason: str, began: int, ends: int
) -> None:
    config = shrink(overrides, steps=60)
    seldom, always = (list(train(config, text, flush_seconds=seconds)) for seconds in (NEVER, 0))
    for reports in (seldom, always):
        last = reports[-1]
        assert (last.status, last.reason, last.diverged_step, last.step) == ("diverged", reason, began, ends)
        assert trace_of(reports)["step"].tolist() == list(range(1, ends + 1))
    assert_same_bits(trace_of(seldom), trace_of(always))
    assert_same_bits(trace_of(seldom), trace_of(reports_in_pieces(config, text, {1, 4, 25})))
    trace = trace_of(seldom)
    bad = ~np.isfinite(trace["loss" if reason == "nonfinite_loss" else "grad_norm"])
    assert bad.tolist() == [step >= 2 for step in range(1, ends + 1)]
    assert trace["skipped"].any() == (config.guard["name"] != "none")


def test_a_loss_that_ends_above_its_first_is_a_divergence(shrink: Shrink, text: Tokens) -> None:
    config = shrink({"optimizer.lr": 5.0}, steps=100)
    *_, last = train(config, text, flush_seconds=NEVER)
    assert (last.status, last.reason, last.diverged_step) == ("diverged", "loss_above_init", 100)
    assert last.rows["step"][-1] == last.step == 100  # it ran to its end
    (again,) = train(config, text, state=through_a_file(last.state()))
    assert (again.status, again.reason, again.rows) == ("diverged", "loss_above_init", {})


def test_an_overflow_is_recorded_skipped_and_halves_the_scale(shrink: Shrink, text: Tokens) -> None:
    trial = Trial(shrink(precision="fp16"), text, CPU)
    trial.run_step()
    trial.loss_scale.scale = torch.tensor(2.0**40)
    before = through_a_file({"model": trial.model.state_dict(), "optimizer": trial.optimizer.state_dict()})
    trial.run_step()
    for name, weight in trial.model.state_dict().items():
        assert torch.equal(weight, before["model"][name]), name
    for number, state in trial.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["optimizer"]["state"][number][k]) for k, value in state.items())
    trial.run_step()
    rows = trial.recorder.flush()
    assert rows["skipped"].tolist()[:2] == [False, True]
    assert math.isfinite(rows["loss"][1]) and not math.isfinite(rows["grad_norm"][1])
    assert rows["loss_scale"].tolist() == [2.0**16, 2.0**40, 2.0**39]


def test_the_recorded_norm_does_not_carry_the_loss_scale(shrink: Shrink, text: Tokens) -> None:
    found = []
    for scale in (2.0**8, 2.0**12, 2.0**14):
        trial = Trial(shrink(precision="fp16"), text, CPU)
        trial.loss_scale.scale = torch.tensor(scale)
        trial.run_step()
        found.append(trial.recorder.flush()["grad_norm"][0])
    single = run(shrink(steps=1), text)["grad_norm"][0]
    np.testing.assert_allclose(found, single, rtol=5e-3)


class SlowTokens:
    """A corpus on a disk that takes its time."""

    def __init__(self, tokens: np.ndarray, seconds: float) -> None:
        self.tokens, self.seconds = tokens, seconds

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SlowTokens(self.tokens[index], self.seconds)
        time.sleep(self.seconds)
        return self.tokens[index]


def test_the_wait_for_data_is_told_as_a_share_of_the_time(shrink: Shrink, text: Tokens) -> None:
    slow: Any = replace(text, tokens=SlowTokens(text.tokens, 0.08))  # type: ignore[arg-type]
    config = shrink(steps=8)
    shares = [
        [report.data_wait for report in train(config, data, flush_seconds=NEVER)] for data in (text, slow)
    ]
    assert 0 < shares[0][0] < shares[1][0] <= 1 and shares[1][0] > 0.2
    assert_same_bits(run(config, text), run(config, slow))


def test_validation_is_on_text_that_is_never_trained_on_and_changes_nothing(
    shrink: Shrink, text: Tokens
) -> None:
    config = shrink({"validation.period": 6, "validation.batches": 3, "validation.fraction": 0.2})
    plain = run(shrink({"validation.fraction": 0.2}), text)
    trace = run(config, text)
    assert_same_bits({name: trace[name] for name in CORE}, plain)
    sampled = ~np.ma.getmaskarray(trace["val_loss"])
    assert (np.flatnonzero(sampled) + 1).tolist() == [6, 12, 18, 20]
    assert trace["val_loss"][19] < trace["val_loss"][5]
    # The last fifth of this corpus is of another letter.
    two = np.where(np.arange(1000) < 800, 1, 2).astype(np.uint8)
    trial = Trial(config, Tokens(two, 256, {}), CPU)
    assert all((trial.batches(step) == 1).all() for step in range(1, 200))
    assert (trial.held_out == 2).all() and len(trial.held_out) == 200


def test_the_validation_loss_is_the_mean_over_the_same_batches_each_time(
    shrink: Shrink, text: Tokens
) -> None:
    config = shrink(
        {"validation.period": 1, "validation.batches": 3, "optimizer": {"name": "sgd", "lr": 0.0}}
    )
    trial = Trial(config, text, CPU)
    for _ in range(3):
        trial.run_step()
    found = trial.recorder.flush()["val_loss"]
    assert found[0] == found[1] == found[2] and trial.model.training
    batches = Batches(text.tokens[-int(len(text.tokens) * 0.05) :], config.model.context_length, 4, 0)
    windows = torch.cat([torch.from_numpy(batches(step)) for step in (1, 2, 3)])
    with torch.no_grad():
        expected = trial.model.loss(windows[:, :-1], windows[:, 1:])[1]
    assert found[0] == pytest.approx(expected.item(), rel=1e-6)


def test_a_bidirectional_model_hides_what_it_has_to_say(shrink: Shrink, text: Tokens) -> None:
    trial = Trial(shrink({"model.causal": False, "mask_fraction": 0.3}), text, CPU)
    inputs, targets = trial._batch(trial.batches, 1)
    hidden = targets >= 0
    assert trial.model.config.vocab_size == 257 and (inputs[hidden] == 256).all()
    assert (inputs[~hidden] < 256).all() and inputs.shape == targets.shape == (4, 12)
    assert hidden.float().mean().item() == pytest.approx(0.3, abs=0.15)
    trace = run(shrink({"model.causal": False}, steps=60), text)
    assert trace["loss"][-10:].mean() < trace["loss"][0] - 1


def test_the_default_corpus_trains(shrink: Shrink) -> None:
    trace = run(shrink(steps=60), load_corpus("stdlib"))
    assert trace["loss"][0] == pytest.approx(math.log(256), rel=0.02)
    assert trace["loss"][-10:].mean() < trace["loss"][0] - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("overrides", SETTINGS, ids=str)
def test_a_step_never_waits_for_the_device(shrink: Shrink, text: Tokens, overrides: dict[str, Any]) -> None:
    trial = Trial(shrink(overrides), text, torch.device("cuda"))
    for _ in range(3):  # what is built once may wait
        trial.run_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            trial.run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trial.recorder.flush()["step"].tolist() == list(range(1, 10))

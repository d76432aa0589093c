"""What is recorded of a step is that step's, in one transfer, and costs nothing where it is not sampled."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from study.config import RecordSection
from study.recording import Recorder, sample_groups
from study.train import Trial

CPU = torch.device("cpu")
ALL = RecordSection(grad_norms=True, update_ratios=True, activations=True)


def test_rows_come_back_in_order_with_their_columns_types_and_gaps() -> None:
    recorder = Recorder(CPU)
    for step in range(3, 8):
        sampled = {"val_loss": torch.tensor(10.0 * step)} if step in (4, 7) else {}
        if step == 5:
            sampled = {"attn_logit_max": torch.tensor(math.nan)}
        recorder.add(
            step,
            {"loss": torch.tensor(float(step), dtype=torch.float64), "skipped": torch.tensor(step == 6)},
            lr=step / 10,
            sampled=sampled,
        )
    assert len(recorder) == 5
    rows = recorder.flush()
    assert rows["step"].dtype == np.int32 and rows["step"].tolist() == [3, 4, 5, 6, 7]
    assert rows["loss"].dtype == np.float32 and rows["loss"].tolist() == [3, 4, 5, 6, 7]
    assert rows["skipped"].dtype == bool and rows["skipped"].tolist() == [False, False, False, True, False]
    np.testing.assert_array_equal(rows["lr"], np.array([0.3, 0.4, 0.5, 0.6, 0.7], np.float32))
    assert rows["val_loss"].mask.tolist() == [True, False, True, True, False]
    assert rows["val_loss"].compressed().tolist() == [40.0, 70.0]
    assert rows["attn_logit_max"].mask.tolist() == [True, True, False, True, True]
    assert np.isnan(rows["attn_logit_max"].compressed()).all()  # sampled, and not a number
    assert len(recorder) == 0


def test_the_next_flush_has_only_what_came_since() -> None:
    recorder = Recorder(CPU)
    row = {"loss": torch.tensor(1.0), "skipped": torch.tensor(False)}
    recorder.add(1, row, lr=1.0, sampled={"val_loss": torch.tensor(1.0)})
    recorder.flush()
    recorder.add(2, row, lr=1.0, sampled={})
    rows = recorder.flush()
    assert rows["step"].tolist() == [2] and "val_loss" not in rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-45, 3.4028235e38, -0.0])
def test_values_are_kept_to_the_bit(value: float) -> None:
    recorder = Recorder(CPU)
    recorder.add(1, {"loss": torch.tensor(value), "skipped": torch.tensor(False)}, lr=1.0, sampled={})
    found = recorder.flush()["loss"]
    np.testing.assert_array_equal(found.view(np.int32), np.array([value], np.float32).view(np.int32))


def recorded(shrink: Any, text: Any, **settings: Any) -> tuple[Trial, dict[str, Any]]:
    trial = Trial(shrink(settings), text, CPU)
    for _ in range(7):
        trial.run_step()
    return trial, trial.recorder.flush()


def test_squares_of_group_norms_sum_to_that_of_the_global_norm(shrink: Any, text: Any) -> None:
    for tied in (False, True):
        settings = {"record.grad_norms": True, "record.period": 3, "model.tie_embeddings": tied}
        trial, rows = recorded(shrink, text, **settings)
        groups = [name for name in rows if name.startswith("grad_norm/")]
        assert {name.partition("/")[2] for name in groups} == set(trial.model.groups())
        for name in groups:
            assert rows[name].mask.tolist() == [False, True, True, False, True, True, False]
        total = sum(rows[name].astype(np.float64) ** 2 for name in groups)
        np.testing.assert_allclose(np.sqrt(total.compressed()), rows["grad_norm"][::3], rtol=1e-6)


def test_an_update_ratio_is_the_step_that_was_taken_over_the_weights_before(shrink: Any, text: Any) -> None:
    trial = Trial(shrink({"record.update_ratios": True, "record.period": 1}), text, CPU)
    trial.run_step()
    before = {name: [p.detach().clone() for p in group] for name, group in trial.model.groups().items()}
    trial.recorder.flush()
    trial.run_step()
    rows = trial.recorder.flush()
    for name, group in trial.model.groups().items():
        changes = [p.detach() - old for p, old in zip(group, before[name], strict=True)]
        change, size = (
            math.sqrt(sum(t.double().square().sum().item() for t in many)) for many in (changes, before[name])
        )
        assert rows[f"update_ratio/{name}"][0] == pytest.approx(change / size, rel=1e-5)


def test_sampling_changes_nothing_else_to_the_bit(shrink: Any, text: Any) -> None:
    _, plain = recorded(shrink, text)
    everything = {"record.grad_norms": True, "record.update_ratios": True, "record.activations": True}
    _, rows = recorded(shrink, text, **everything, **{"record.period": 2})
    for name, values in plain.items():
        np.testing.assert_array_equal(rows[name], values)
    assert {"attn_logit_max", "act_rms/block0", "act_rms/block1"} <= set(rows)
    assert rows["act_rms/block1"].mask.tolist() == [False, True] * 3 + [False]
    assert (rows["act_rms/block0"].compressed() > 0).all()


def test_a_step_that_is_not_sampled_measures_nothing(shrink: Any, text: Any) -> None:
    trial = Trial(shrink(), text, CPU)
    with sample_groups(trial.model, ALL, False) as groups:
        groups.measure_gradients()
        groups.measure_updates()
    assert groups.values == {} and groups.before == {}
    with sample_groups(trial.model, RecordSection(), True) as groups:
        groups.measure_gradients()
        groups.measure_updates()
    assert groups.values == {} and groups.before == {}

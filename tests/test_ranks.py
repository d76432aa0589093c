"""Several processes that train one trial, over gloo: the numbers are those of one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from study.config import ConfigError, trial_config
from study.data import Tokens
from study.train import train

TRIAL = {
    "model": {"d_model": 32, "num_layers": 2, "context_length": 24},
    "optimizer": {"lr": 1e-3},
    "clip": {"max_norm": 0.5},
    "batch_size": 8,
    "steps": 6,
    "validation": {"period": 3, "batches": 2},
    "record": {"period": 2, "grad_norms": True, "update_ratios": True, "activations": True, "model_update": True},
}  # fmt: skip
PARALLEL = ("ddp", "fsdp2")
LLAMA = {"import": "examples.hf_causal_lm:build", "context_length": 12, "hidden_size": 16, "num_layers": 2}


def corpus():
    random = np.random.default_rng(0)
    return Tokens(random.integers(0, 64, 20_000).astype(np.uint8), 64, {})


def rank_main(rank, folder, workers, jobs):
    """One rank: takes the trials one after another and writes what it recorded of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers)
    try:
        rows = {
            name: rows_of(overrides | {"workers": workers}, stop_at)
            for name, (overrides, stop_at) in jobs.items()
        }
        torch.save(rows, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def rows_of(overrides, stop_at=None):
    """What one trial records, to its end; by way of a checkpoint after step `stop_at`."""
    config = trial_config(TRIAL, overrides)
    found, state = [], None
    if stop_at is not None:
        for report in train(config, corpus(), flush_seconds=1e-9):
            found.append(report.rows)
            if report.step == stop_at:
                state = report.state()
                break
        # What lies in the storage: the first rank's state, as every rank reads it again.
        box = [state]
        if dist.is_initialized():
            dist.broadcast_object_list(box)
        (state,) = box
    for report in train(config, corpus(), state=state, flush_seconds=1e-9):
        found.append(report.rows)
    names = dict.fromkeys(name for rows in found for name in rows)
    absent = [np.full(len(rows["step"]), np.nan) for rows in found]
    return {
        name: np.concatenate(
            [np.ma.filled(rows.get(name, none), np.nan) for rows, none in zip(found, absent, strict=True)]
        )
        for name in names
    }


def shared(folder, workers, jobs):
    """What each rank recorded, by the jobs' names."""
    processes.spawn(rank_main, args=(str(folder), workers, jobs), nprocs=workers)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(workers)]


VARIANTS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "masked": {"model.causal": False},
    "masked and accumulated": {"model.causal": False, "accumulate": 2},
    "zclip": {"clip": {"name": "zclip", "max_grad_norm": 0.5}},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


@pytest.fixture(scope="module", params=PARALLEL)
def both_ranks(request, tmp_path_factory):
    parallel = {"parallel": request.param}
    jobs = {name: (overrides | parallel, None) for name, overrides in VARIANTS.items()}
    jobs["resumed"] = (parallel, 3)
    return shared(tmp_path_factory.mktemp(request.param), 2, jobs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_record_what_one_process_records(both_ranks, variant):
    alone = rows_of(VARIANTS[variant])
    first, second = (rows[variant] for rows in both_ranks)
    exact = "16" not in variant
    assert first.keys() == alone.keys()
    for name, expected in alone.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        tolerance = (1e-6 if name in ("grad_norm", "loss") else 1e-4) if exact else 0.05
        np.testing.assert_allclose(first[name], expected, rtol=tolerance, atol=1e-7, err_msg=name)
    assert (first["grad_norm"] > first["grad_norm_clipped"]).all()


def test_ranks_go_on_exactly(both_ranks):
    for rows in both_ranks:
        for name, values in rows["plain"].items():
            np.testing.assert_array_equal(rows["resumed"][name], values, err_msg=name)


def test_ranks_record_of_an_imported_model_what_one_process_records(tmp_path):
    imports = {"model": LLAMA, "optimizer": {"import": "torch.optim:SGD", "lr": 0.1}}
    record = {"period": 2, "grad_norms": True, "activations": True}
    alone = rows_of(imports | {"record": record})
    for rows in shared(tmp_path, 2, {"llama": (imports | {"record": record}, None)}):
        assert rows["llama"].keys() == alone.keys()
        for name, expected in alone.items():
            np.testing.assert_allclose(rows["llama"][name], expected, rtol=1e-4, atol=1e-7, err_msg=name)


def test_three_ranks_too(tmp_path):
    more = {"batch_size": 9}
    expected = rows_of(more)["grad_norm"]
    for rows in shared(tmp_path, 3, {"nine": (more, None)}):
        np.testing.assert_allclose(rows["nine"]["grad_norm"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": "fsdp2"}, "parallel has no effect on one worker"),
        ({"workers": 3}, "workers 3 must divide batch_size 8"),
        ({"workers": 2, "parallel": "fsdp2", "clip": "agc"}, "clip agc judges whole tensors"),
        ({"workers": 2, "parallel": "fsdp2", "optimizer": "muon"}, "optimizer muon"),
        ({"workers": 2, "parallel": "fsdp2", "model.block": "ngpt", "model.norm": "none"}, "ngpt"),
        ({"workers": 2, "parallel": "fsdp2", "model.relaxation": "qk_clip"}, "qk_clip changes whole"),
        ({"workers": 2, "parallel": "fsdp2", "model": LLAMA}, "fsdp2 is untried on an imported model"),
        (
            {"workers": 2, "parallel": "fsdp2", "optimizer": {"import": "torch.optim:SGD", "lr": 1}},
            "fsdp2 is untried on an imported optimizer",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        trial_config(TRIAL, settings, "study.yaml: trial")

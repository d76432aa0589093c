"""Somebody's own model, loss, optimizer and data go through a trial as ours do, or are refused in one line."""

import copy
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trial_runs import NEVER, assert_same_bits, assert_same_state, reports_in_pieces, run, trace_of

from models.imported import ImportedModel, blocks_path
from service.fields import fields_of
from study.config import ConfigError, StudyConfig, TrialConfig, trial_config
from study.data import Batches, DataError, Tokens, load_corpus
from study.estimates import estimate
from study.selectors import flatten
from study.space import plan_trials
from study.train import Trial, train

CPU = torch.device("cpu")
BROUGHT = '''
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from study.data import Tokens

NUMBERS = {}


class Layer(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.mix, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.drop(torch.tanh(self.mix(self.norm(past))))


class Mean(nn.Module):
    """Every position sees the mean of its past; `tied`: the head is the embedding."""

    def __init__(self, *, vocab_size, context_length, width=8, num_layers=2, dropout=0.0, tied=False, frozen=True):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(num_layers))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.gain = nn.Parameter(torch.ones(width))
        self.constant = nn.Parameter(torch.ones(width), requires_grad=not frozen)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.gain * x + self.constant)


def build(*, vocab_size, context_length, **options):
    return Mean(vocab_size=vocab_size, context_length=context_length, **options)


class Looks(Mean):
    """Reads a number of its own while it is made, and one of the batch while it runs."""

    def __init__(self, *, vocab_size, context_length):
        super().__init__(vocab_size=vocab_size, context_length=context_length)
        self.first = self.gain[0].item()

    def forward(self, tokens):
        assert tokens.max().item() >= 0
        return super().forward(tokens)


class Flat(Mean):
    def forward(self, tokens):
        return super().forward(tokens).flatten(0, 1)


def bare(*, vocab_size, context_length):
    return nn.Sequential(nn.Embedding(vocab_size, 4), nn.Linear(4, vocab_size))


def normed(*, vocab_size, context_length, norm="layer", causal=True):
    assert norm in ("layer", "none"), f"no {norm}"
    return Mean(vocab_size=vocab_size, context_length=context_length, width=8 if causal else 4)


def smoothed(logits, targets, *, smoothing=0.1):
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=smoothing
    )


def unreduced(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


class Signs(torch.optim.Optimizer):
    """p -= lr sign(g), with a counter on the host, one in the group and a mean on the device."""

    def __init__(self, params, lr, beta):
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - group["beta"])
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(group["lr"] * (1 + 1 / state["steps"] + 1 / group["count"]) * state["mean"].sign())


def signs(named_parameters, *, lr, beta=0.9):
    assert 0 <= beta < 1, f"beta {beta}"
    named = list(named_parameters)
    NUMBERS["names"] = [name for name, _ in named]
    return Signs([p for _, p in named], lr, beta)


def newton(named_parameters, *, lr=1.0):
    return torch.optim.LBFGS([p for _, p in named_parameters], lr=lr)


def listed(named_parameters, *, lr=1.0):
    return list(named_parameters)


def count_up(*, length=2000, vocab_size=50):
    return np.arange(length) % vocab_size, vocab_size


def as_tokens(*, length=2000):
    return Tokens(np.arange(length) % 50, 50, {"sha256": "made up", "why": "a test"})


def too_large():
    return np.arange(100), 50


def fails(**options):
    raise OSError("the disk\\nis gone")
'''
Shrink = Callable[..., TrialConfig]


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, which nothing else leads to."""
    name = f"brought_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(BROUGHT)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.fixture
def bring(brought: str, shrink: Shrink) -> Callable[..., TrialConfig]:
    """A small trial of the brought model: `bring({"model.width": 4}, loss="smoothed")`."""

    def config(overrides: dict[str, Any] | None = None, model: str = "build", **parts: Any) -> TrialConfig:
        section = {"import": f"{brought}:{model}", "context_length": 12}
        imports = {
            f"{key}.import": f"{brought}:{value}" for key, value in parts.items() if isinstance(value, str)
        }
        settings = {key: value for key, value in parts.items() if not isinstance(value, str)}
        raw = {"optimizer": {"lr": 1e-2}, "steps": 12, "batch_size": 4, "model": section}
        if "optimizer.import" in imports:
            raw["optimizer"] = {"lr": 1e-2}
        return trial_config(raw, imports | settings | (overrides or {}), "study.yaml: trial")

    return config


def by_hand(config: TrialConfig, model: nn.Module, data: Tokens) -> dict[str, list[float]]:
    """The loop that everybody writes; the model is made by the caller from the trial's seed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = config.optimizer["lr"]
    groups = [{"params": [p for p in trained if (p.ndim >= 2) == decays], "weight_decay": 0.01 * decays}
              for decays in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    held_out = int(len(data.tokens) * 0.05)
    batches = Batches(data.tokens[:-held_out], config.model.context_length, config.batch_size, config.seed)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(1, config.steps + 1):
        tokens = torch.from_numpy(batches(step))
        made = model(tokens[:, :-1])
        logits = getattr(made, "logits", made)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.clip["max_norm"])
        optimizer.step()
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm.item())
    return found


def assert_as_by_hand(config: TrialConfig, model: nn.Module, data: Tokens) -> None:
    trace = run(config, data)
    for name, values in by_hand(config, model, data).items():
        np.testing.assert_array_equal(trace[name], np.array(values, np.float32), name)


def test_loss_and_norm_of_a_brought_model_are_those_of_torch_to_the_bit(
    bring: Any, brought: str, text: Tokens
) -> None:
    config = bring(steps=20, seed=3)
    torch.manual_seed(3)
    assert_as_by_hand(config, sys.modules[brought].build(vocab_size=256, context_length=12), text)


def test_loss_and_norm_of_a_hugging_face_model_are_those_of_torch_to_the_bit(text: Tokens) -> None:
    from examples.hf_causal_lm import build

    section = {
        "import": "examples.hf_causal_lm:build",
        "context_length": 12,
        "hidden_size": 16,
        "num_layers": 2,
    }
    config = trial_config({"model": section, "steps": 20, "batch_size": 4}, {"model.num_heads": 2})
    assert estimate(config, text).num_parameters > 0
    torch.manual_seed(0)
    model = build(vocab_size=256, context_length=12, hidden_size=16, num_layers=2, num_heads=2)
    assert_as_by_hand(config, model, text)
    groups = ImportedModel(model, 256).groups()
    assert {"model.embed_tokens", "block0.self_attn", "block1.mlp", "model.norm", "lm_head"} <= set(groups)


EVERYTHING = {"record.grad_norms": True, "record.update_ratios": True, "record.activations": True,
              "record.model_update": True, "record.period": 3, "validation.period": 4}  # fmt: skip
RESUMED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"model.dropout": 0.3, "model.tied": True, "accumulate": 2}, {}),
    ({"model.causal": False, "precision": "bf16", "clip": "zclip", **EVERYTHING}, {"loss": "smoothed"}),
    ({"precision": "fp16", "reset": {"name": "momentum_reset", "period": 5}}, {"optimizer": "signs"}),
]


@pytest.mark.parametrize(("overrides", "parts"), RESUMED, ids=str)
def test_a_brought_trial_that_dies_again_and_again_has_the_trace_of_one_that_never_did(
    bring: Any, text: Tokens, overrides: dict[str, Any], parts: dict[str, str]
) -> None:
    config = bring(overrides, **parts)
    straight = list(train(config, text, flush_seconds=NEVER))
    pieces = reports_in_pieces(config, text, {1, 2, 5, 9, 11})
    assert_same_bits(trace_of(straight), trace_of(pieces))
    assert_same_state(straight[-1].state(), pieces[-1].state())


@given(num_layers=st.integers(1, 4), tied=st.booleans(), frozen=st.booleans(), nested=st.booleans())
def test_every_trainable_parameter_is_in_one_group(
    num_layers: int, tied: bool, frozen: bool, nested: bool
) -> None:
    model = module_of(num_layers, tied, frozen)
    if nested:
        model = nn.ModuleDict({"inner": model})
    groups = ImportedModel(model, 9).groups()
    members = [p for group in groups.values() for p in group]
    assert sorted(map(id, members)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(set(map(id, members))) == len(members)
    if num_layers > 1:
        assert {f"block{index}.mix" for index in range(num_layers)} <= set(groups)


def module_of(num_layers: int, tied: bool, frozen: bool) -> nn.Module:
    space: dict[str, Any] = {}
    exec(BROUGHT, space)
    return space["build"](vocab_size=9, context_length=5, num_layers=num_layers, tied=tied, frozen=frozen)


def test_squares_of_a_brought_models_group_norms_sum_to_that_of_the_global_norm(
    bring: Any, text: Tokens
) -> None:
    for tied in (False, True):
        trace = run(bring({"model.tied": tied, "record.grad_norms": True, "record.period": 1}), text)
        groups = {name for name in trace if name.startswith("grad_norm/")}
        assert "grad_norm/block1.mix" in groups and "grad_norm/constant" not in groups
        assert ("grad_norm/head" in groups) == (not tied)
        total = sum(trace[name].astype(np.float64) ** 2 for name in groups)
        np.testing.assert_allclose(np.sqrt(total), trace["grad_norm"], rtol=1e-6)


def test_act_rms_is_that_of_what_comes_out_of_each_block_and_observing_changes_no_bit(
    bring: Any, text: Tokens
) -> None:
    watched = {"record.activations": True, "record.period": 1}
    plain, trace = run(bring(), text), run(bring(watched), text)
    np.testing.assert_array_equal(plain["loss"], trace["loss"])
    trial = Trial(bring(watched), text, CPU)
    outputs: list[torch.Tensor] = []
    trial.model.model.layers[1].register_forward_hook(lambda *args: outputs.append(args[2].detach()))
    trial.run_step()
    rows = trial.recorder.flush()
    assert {name for name in rows if "act" in name} == {"act_rms/block0", "act_rms/block1"}
    assert rows["act_rms/block1"][0] == pytest.approx(outputs[0].square().mean().sqrt().item(), rel=1e-6)


def test_the_blocks_are_the_list_that_holds_most_parameters() -> None:
    inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    outer = nn.ModuleList(nn.ModuleDict({"experts": inner, "out": nn.Linear(2, 2)}) for _ in range(3))
    mixed = nn.Sequential(nn.Linear(50, 50), nn.Tanh())
    assert blocks_path(nn.ModuleDict({"head": mixed, "layers": outer})) == "layers"
    assert blocks_path(nn.ModuleDict({"head": mixed})) is None


def test_a_frozen_parameter_is_left_alone_and_not_counted(bring: Any, brought: str, text: Tokens) -> None:
    config = bring(optimizer="signs")
    frozen, free = (estimate(bring({"model.frozen": on}), text) for on in (True, False))
    assert free.num_parameters == frozen.num_parameters + 8
    assert frozen.memory == 16 * frozen.num_parameters + 4 * 8
    trial = Trial(config, text, CPU)
    for _ in range(3):
        trial.run_step()
    assert torch.equal(trial.model.model.constant, torch.ones(8))
    names = sys.modules[brought].NUMBERS["names"]
    assert "embed.weight" in names and "constant" not in names


def test_a_model_that_reads_its_numbers_while_it_is_made_is_tried_in_earnest(
    bring: Any, text: Tokens
) -> None:
    before = torch.get_rng_state()
    assert estimate(bring(model="Looks"), text).num_parameters > 0
    assert torch.equal(before, torch.get_rng_state())


def test_an_estimate_counts_parameters_as_the_trial_has_them(bring: Any, text: Tokens) -> None:
    for overrides in ({}, {"model.tied": True}, {"model.causal": False}, {"model.num_layers": 5}):
        config = bring(overrides)
        trial = Trial(config, text, CPU)
        assert estimate(config, text).num_parameters == sum(p.numel() for p in set(trial.parameters))


@pytest.mark.parametrize("own_model", [True, False])
def test_a_brought_loss_is_what_is_minimized_and_recorded(
    bring: Any, shrink: Shrink, brought: str, text: Tokens, own_model: bool
) -> None:
    spec = {"import": f"{brought}:smoothed", "smoothing": 0.3}
    make = shrink if own_model else bring
    plain, smoothed, none = (
        run(make(loss), text) for loss in ({}, {"loss": spec}, {"loss": spec | {"smoothing": 0.0}})
    )
    assert not np.array_equal(plain["loss"], smoothed["loss"])
    assert smoothed["loss"][0] != plain["loss"][0]
    assert_same_bits(plain, none)


def test_z_loss_beside_a_brought_loss_is_refused(shrink: Shrink, brought: str) -> None:
    with pytest.raises(ConfigError, match=r"z_loss 0.1 is no part of the imported loss .*known: .*\(test\)"):
        shrink({"loss": {"import": f"{brought}:smoothed"}, "model.z_loss": 0.1})


def test_a_brought_optimizer_follows_the_schedule_and_a_skipped_step_changes_nothing(
    bring: Any, text: Tokens
) -> None:
    config = bring({"schedule.warmup_steps": 4}, optimizer="signs", steps=8)
    trace = run(config, text)
    np.testing.assert_allclose(trace["lr"], 1e-2 * np.minimum(np.arange(1, 9) / 4, 1), rtol=1e-6)
    assert abs(trace["loss"][-1] - trace["loss"][0]) > 1e-3
    trial = Trial(bring({"precision": "fp16"}, optimizer="signs"), text, CPU)
    trial.run_step()
    trial.run_step()
    before = through(trial)
    trial.loss_scale.scale = torch.tensor(2.0**60)
    trial.run_step()
    assert trial.recorder.flush()["skipped"].tolist()[-1]
    assert_same_state(before, through(trial))


def through(trial: Trial) -> dict[str, Any]:
    state = {"model": trial.model.state_dict(), "optimizer": trial.optimizer.state_dict()}
    return copy.deepcopy(state)


def test_muon_takes_a_hugging_face_models_ends_for_what_they_are(bring: Any, text: Tokens) -> None:
    trial = Trial(bring({"optimizer": "muon"}), text, CPU)
    by_muon = [
        p for part in trial.optimizer.parts[:1] for group in part.param_groups for p in group["params"]
    ]
    layers = trial.model.model.layers
    assert {id(p) for p in by_muon} == {id(layer.mix.weight) for layer in layers}


def test_what_was_resolved_says_everything_and_resolves_to_itself(bring: Any, brought: str) -> None:
    config = bring({"model.width": 6}, model="Mean", loss="smoothed", optimizer="signs", data="count_up")
    raw = config.model_dump()
    assert raw["model"] == {
        "import": f"{brought}:Mean", "context_length": 12, "causal": True, "width": 6, "num_layers": 2,
        "dropout": 0.0, "tied": False, "frozen": True,
    }  # fmt: skip
    assert raw["loss"] == {"import": f"{brought}:smoothed", "smoothing": 0.1}
    assert raw["optimizer"] == {"import": f"{brought}:signs", "lr": 1e-2, "beta": 0.9}
    assert raw["data"] == {"import": f"{brought}:count_up", "length": 2000, "vocab_size": 50}
    assert TrialConfig.model_validate(raw) == config
    fields = flatten(raw)
    assert fields["model.import"] == f"{brought}:Mean" and fields["model.width"] == 6
    assert fields["optimizer.lr"] == 1e-2


def test_arms_and_space_reach_the_options_of_imports(brought: str) -> None:
    study = StudyConfig(
        name="own",
        trial={
            "model": {"import": f"{brought}:build", "width": 4},
            "optimizer": {"import": f"{brought}:signs", "lr": 1.0},
        },
        arms=[{"model.num_layers": 3}, {"optimizer": {"import": f"{brought}:signs", "lr": 0.5}}],
        space={"optimizer.lr": [0.1, 0.2], "model.context_length": [8, 16]},
    )
    plans = plan_trials(study, "own.yaml")
    assert [plan.config.optimizer["lr"] for plan in plans[:4]] == [0.1, 0.1, 0.2, 0.2]
    assert [plan.config.model.context_length for plan in plans[:2]] == [8, 16]
    assert plans[0].config.model_dump()["model"]["num_layers"] == 3
    assert plans[0].arm == "num_layers=3 | optimizer.lr=0.1 | context_length=8"
    assert plans[-1].arm.startswith(f"optimizer={brought}:signs (lr 0.5)")
    row = {"summary": {}, "config": plans[0].config.model_dump()}
    assert fields_of(dict.fromkeys(("id", "number", "arm", "arm_number", "seed", "status", "reason",
        "diverged_step", "step", "num_steps", "loss", "grad_norm", "steps_per_second", "started_at", "ended_at",
        "attempts", "num_parameters")) | row)["model.import"] == f"{brought}:build"  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model.import": "nowhere_at_all:build"}, "no module 'nowhere_at_all' for model; looked in /"),
    ({"model.import": "models.mine:build"}, "no module 'models.mine' for model; 'models' is a package of"),
    ({"model.import": "NAME"}, "import 'NAME' of model; must be module:name, such as my_module:build"),
    ({"model.import": 3}, "import 3 of model; must be module:name"),
    (
        {"model.import": "NAME_broken:build"},
        "model 'NAME_broken:build' can't be imported: ModuleNotFoundError: No",
    ),
    (
        {"model.import": "NAME:biuld"},
        "unknown name in 'NAME' for model 'biuld', did you mean 'build'?; known: Flat",
    ),
    ({"model.import": "NAME:NUMBERS"}, "model 'NAME:NUMBERS' is dict; must be callable"),
    (
        {"model.import": "NAME:signs"},
        "model 'NAME:signs' takes named_parameters, lr, beta; must take vocab_size=",
    ),
    (
        {"model": {"import": "NAME:Mean", "num_layer": 3}},
        "unknown option of model 'NAME:Mean' 'num_layer', did you",
    ),
    ({"model.wdth": 3}, "model 'NAME:build' can't be made: TypeError: "),
    (
        {"model.block": "post"},
        "block has no effect on the imported model 'NAME:build', which doesn't name it",
    ),
    ({"model.relaxation": {"alpha": 3}}, "relaxation has no effect on the imported model"),
    ({"model.context_length": -1}, "input should be greater than 0, got -1"),
    ({"model.vocab_size": 3}, "vocab_size comes from the data; leave it out"),
    (
        {"model": {"import": "NAME:normed", "norm": "rms"}},
        "model 'NAME:normed' can't be made: AssertionError: no rms",
    ),
    (
        {"model.import": "NAME:Flat"},
        "model 'NAME:Flat' fails on a batch: OutputError: the model gave logits of shape ",
    ),
    (
        {"model.import": "NAME:count_up"},
        "model 'NAME:count_up' takes length, vocab_size; must take vocab_size=",
    ),
    ({"model.import": "NAME:fails"}, "model 'NAME:fails' can't be made: OSError: the disk is gone"),
    (
        {"model.import": "NAME:bare", "record.activations": True},
        "record.activations finds no list of like blocks",
    ),
    (
        {"record.activations": True, "compile": True},
        "record.activations sees nothing of a compiled imported model",
    ),
    ({"loss": "smoothed"}, "loss 'smoothed'; must be {import: module:name, option: value}, or left out"),
    (
        {"loss": {"import": "NAME:smoothed", "smothing": 1}},
        "unknown option of loss 'NAME:smoothed' 'smothing', did",
    ),
    (
        {"loss": {"import": "NAME:smoothed", "smoothing": 7}},
        "loss 'NAME:smoothed' fails on a batch: RuntimeError: ",
    ),
    (
        {"loss.import": "NAME:unreduced"},
        "loss 'NAME:unreduced' gave Tensor of shape (6,); must be a 0-dim tensor",
    ),
    (
        {"loss.import": "NAME:build"},
        "loss 'NAME:build' takes vocab_size, context_length, options; must take logits, t",
    ),
    ({"optimizer": {"import": "NAME:signs"}}, "optimizer 'NAME:signs' needs its option 'lr'"),
    (
        {"optimizer": {"import": "NAME:signs", "lr": 1, "beta": 2}},
        "optimizer 'NAME:signs' can't be made: AssertionErr",
    ),
    (
        {"optimizer": {"import": "NAME:signs", "lr": 1, "betas": 2}},
        "unknown option of optimizer 'NAME:signs' 'betas'",
    ),
    ({"optimizer": {"import": "NAME:newton"}}, "optimizer 'NAME:newton' needs a closure at every step"),
    (
        {"optimizer": {"import": "NAME:listed"}},
        "optimizer 'NAME:listed' gave list; must be torch's Optimizer",
    ),
    ({"clip": {"import": "NAME:signs"}}, "clip can't be imported; known: adagc, agc, "),
    (
        {"data": {"import": "NAME:as_tokens", "lenght": 3}},
        "unknown option of data 'NAME:as_tokens' 'lenght', did you",
    ),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_be_used_is_refused_in_one_line_that_ends_with_its_place(
    bring: Any, brought: str, text: Tokens, overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        estimate(bring(named(overrides, brought)), text, "study.yaml: trial")
    message = str(caught.value)
    assert says.replace("NAME", brought) in message
    assert "\n" not in message and message.endswith(")") and "(study.yaml: trial" in message


def named(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: named(item, name) for key, item in value.items()}
    return value.replace("NAME", name) if isinstance(value, str) else value


def test_a_name_that_the_signature_has_is_the_imports_own(bring: Any, text: Tokens) -> None:
    config = bring({"model.norm": "none", "model.causal": False}, model="normed")
    assert config.model_dump()["model"]["norm"] == "none"
    assert Trial(config, text, CPU).model.model.gain.shape == (4,)  # causal was handed over


def test_brought_data_are_known_by_the_hash_of_their_tokens(brought: str) -> None:
    plain = load_corpus({"import": f"{brought}:count_up"})
    expected = hashlib.sha256((np.arange(2000) % 50).tobytes()).hexdigest()
    assert plain.vocab_size == 50
    assert plain.identity == {"name": f"{brought}:count_up", "tokens": 2000, "sha256": expected}
    made = load_corpus({"import": f"{brought}:as_tokens"})
    assert made.identity == plain.identity | {"name": f"{brought}:as_tokens", "why": "a test"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "data 'NAME:fails' can't be made: OSError: the disk is gone (trial.data)"),
        (
            "too_large",
            "data 'NAME:too_large' gave tokens from 0 to 99; must be from 0 to 49, below its vocab_size",
        ),
        ("NUMBERS", "data 'NAME:NUMBERS' is dict; must be callable"),
        ("build", "data 'NAME:build' can't be made: TypeError"),
    ],
)
def test_brought_data_that_cannot_be_used_are_refused(brought: str, name: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        load_corpus({"import": f"{brought}:{name}"})
    assert str(caught.value).startswith(says.replace("NAME", brought))

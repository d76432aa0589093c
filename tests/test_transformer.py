"""The model whole: contracts that every variant keeps, causality, the loss, and the stack's ends."""

import itertools
import math
import subprocess
import sys

import model_oracles as oracle
import pytest
import torch

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.norms import NORMS
from models.transformer import ModelConfig, Transformer, no_op_reasons

ENDS = [
    {"embedding_grad_scale": 0.1},
    {"embedding_norm": True},
    {"embedding_scale": "sqrt_d"},
    {"z_loss": 1e-3},
    {"logit_softcap": 0.5},
    {"tie_embeddings": True},
]
CHOICES = [
    *({"norm": name} for name in NORMS),
    *({"block": name} for name in BLOCKS),
    *({"relaxation": name} for name in RELAXATIONS),
    {"relaxation": {"name": "temperature", "learnable": True}},
    {"scores": "float16"},
    {"causal": False},
    *ENDS,
]


def model_of(seed=0, **changes):
    torch.manual_seed(seed)
    return Transformer(oracle.tiny(**changes))


def batch(seed=1, rows=3):
    tokens = torch.randint(0, 11, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


# --- contracts, over the tables --------------------------------------------------------------------


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_logits_and_losses_have_their_shapes_and_types(changes):
    model, (inputs, targets) = model_of(**changes), batch()
    logits = model(inputs)
    assert logits.shape == (3, 5, 11)
    assert logits.dtype == torch.float32
    for loss in model.loss(inputs, targets):
        assert loss.shape == ()
        assert loss.dtype == torch.float32
        assert loss.isfinite()


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_gradient_reaches_every_parameter(changes):
    model = oracle.randomize(model_of(**changes), std=0.1)  # off ReZero's zeros, which hide a branch
    inputs = torch.arange(10).reshape(2, 5)
    model.loss(inputs, inputs + 1)[0].backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_groups_hold_every_parameter_once(changes):
    model = model_of(**changes)
    groups = model.groups()
    grouped = [id(p) for group in groups.values() for p in group]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert all(groups.values())
    names = {"embedding", "head", "final_norm"} | {
        f"block{i}.{part}" for i in (0, 1) for part in ("attention", "mlp")
    }
    assert set(groups) <= names
    assert set(groups) >= {"embedding", "block1.attention", "block1.mlp"}


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_state_dict_carries_everything(changes):
    model, other, (inputs, targets) = model_of(**changes), model_of(seed=7, **changes), batch()
    model.loss(inputs, targets)  # moves what moves in training
    other.load_state_dict(model.state_dict())
    for _ in range(2):
        assert torch.equal(model(inputs), other(inputs))


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_model_builds_and_runs_on_the_meta_device(changes):
    with torch.device("meta"):
        shell = Transformer(oracle.tiny(**changes))
    assert all(p.is_meta for p in shell.parameters())
    assert shell(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 11)
    model, inputs = model_of(**changes), batch()[0]
    shell.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(shell(inputs), model(inputs))


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_same_seed_gives_the_same_bits(changes):
    (inputs, targets), results = batch(), []
    for _ in range(2):
        model = model_of(**changes)
        objective, _ = model.loss(inputs, targets)
        objective.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.after_step()
        results.append(
            torch.cat([objective[None].detach(), *(p.detach().flatten() for p in model.parameters())])
        )
    assert torch.equal(*results)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_autocast_trains_with_float32_losses_and_gradients(changes, precision):
    model, (inputs, targets) = model_of(**changes), batch()
    with torch.autocast("cpu", precision):
        objective, cross_entropy = model.loss(inputs, targets)
    objective.backward()
    assert objective.dtype == cross_entropy.dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    exact = model.double().loss(inputs, targets)[1]
    torch.testing.assert_close(cross_entropy.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("block", "relaxation"), list(itertools.product(BLOCKS, RELAXATIONS)))
def test_every_pair_trains_or_is_refused_with_the_reason(block, relaxation):
    try:
        model = model_of(block=block, relaxation=relaxation)
    except ValueError as refusal:
        assert block in str(refusal)
        assert relaxation in str(refusal)
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        objective, cross_entropy = model.loss(*batch())
        objective.backward()
        optimizer.step()
        model.after_step()
        losses.append(cross_entropy)
    assert torch.stack(losses).isfinite().all()
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_building_a_config_spends_no_random_numbers(changes):
    before = torch.get_rng_state()
    no_op_reasons(oracle.tiny(**changes), "fp32")
    assert torch.equal(torch.get_rng_state(), before)


# --- what a position sees --------------------------------------------------------------------------


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("block", ["pre", "post", "sub"])
def test_future_tokens_leave_past_logits_bitwise_alone(block, relaxation):
    model = model_of(block=block, relaxation=relaxation).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = torch.tensor([[1, 2, 3, 9, 10]])
    assert torch.equal(model(tokens)[:, :3], model(changed)[:, :3])
    assert not torch.equal(model(tokens)[:, 3], model(changed)[:, 3])


@pytest.mark.parametrize("scores", ["float32", "bfloat16"])
def test_bidirectional_model_sees_the_future(scores):
    model = model_of(causal=False, scores=scores, block={"name": "pre", "init": "xavier"})
    logits, changed = model(torch.tensor([[1, 2, 3, 4, 5]])), model(torch.tensor([[1, 2, 3, 4, 10]]))
    assert (logits[:, :4] != changed[:, :4]).any(-1).all()


def test_shorter_sequences_are_prefixes_and_longer_ones_refused():
    model, tokens = model_of().eval(), torch.tensor([[1, 2, 3, 4, 5]])
    torch.testing.assert_close(model(tokens[:, :3]), model(tokens)[:, :3])
    with pytest.raises(ValueError, match="6 tokens; context_length is 5"):
        model(torch.zeros(1, 6, dtype=torch.int64))


@pytest.mark.parametrize("name", BLOCKS)
def test_model_equals_its_formula_from_tokens_to_logits(name):
    model = oracle.randomize(model_of(block=name), std=0.1).double()
    tokens = batch()[0]
    x = model.token_embedding.weight[tokens] + model.position_embedding.weight[:5]
    if name == "ngpt":
        x = oracle.unit(x)
    if name == "peri":
        x = oracle.norm(model.input_norm, x)
    for index, block in enumerate(model.blocks):
        x = oracle.block(name, block, x, model.config, index)
    if name not in ("post", "deepnorm", "rezero", "ngpt"):
        x = oracle.norm(model.final_norm, x)
    logits = x @ model.head.weight.T
    if name == "ngpt":
        logits = logits * model.logit_gain.weight * math.sqrt(8)
    torch.testing.assert_close(model(tokens), logits, rtol=1e-9, atol=1e-10)


# --- the loss --------------------------------------------------------------------------------------


def test_loss_is_mean_cross_entropy_over_counted_targets():
    model, (inputs, targets) = model_of(), batch()
    targets = targets.clone()
    targets[:, :2] = -100
    objective, cross_entropy = model.loss(inputs, targets)
    by_hand = -torch.log_softmax(model(inputs), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(cross_entropy, by_hand[:, 2:].mean())
    assert torch.equal(objective, cross_entropy)
    assert not cross_entropy.requires_grad


def test_z_loss_adds_the_mean_square_of_log_z_over_counted_targets_only():
    plain, penalized, (inputs, targets) = model_of(), model_of(z_loss=0.5), batch()
    targets = targets.clone()
    targets[0] = -100
    objective, cross_entropy = penalized.loss(inputs, targets)
    log_z = plain(inputs).double().exp().sum(-1).log()
    expected = cross_entropy.double() + 0.5 * (log_z[1:] ** 2).mean()
    torch.testing.assert_close(objective.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(cross_entropy, plain.loss(inputs, targets)[1])


def test_soft_cap_bounds_logits_by_its_formula():
    plain, capped, inputs = model_of(), model_of(logit_softcap=0.01), batch()[0]
    torch.testing.assert_close(capped(inputs), 0.01 * torch.tanh(plain(inputs) / 0.01))
    assert capped(inputs).abs().max() <= 0.01
    assert plain(inputs).abs().max() > 0.02


# --- the embedding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7])
def test_shrinking_embedding_gradients_leaves_all_else_bitwise_alone(alpha):
    plain, shrunk, (inputs, targets) = model_of(), model_of(embedding_grad_scale=alpha), batch()
    losses = [m.loss(inputs, targets)[0] for m in (plain, shrunk)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(plain.named_parameters(), shrunk.parameters(), strict=True):
        if "embedding" in name:
            torch.testing.assert_close(q.grad, alpha * p.grad)
        else:
            assert torch.equal(p.grad, q.grad)


def test_a_tied_head_keeps_its_own_gradient_when_the_embedding_side_shrinks():
    whole, none, (inputs, targets) = (
        model_of(tie_embeddings=True),
        model_of(tie_embeddings=True, embedding_grad_scale=0.0),
        batch(),
    )
    for model in (whole, none):
        model.loss(inputs, targets)[0].backward()
    untied = model_of()
    untied.load_state_dict(whole.state_dict())
    untied.loss(inputs, targets)[0].backward()
    torch.testing.assert_close(none.token_embedding.weight.grad, untied.head.weight.grad)
    torch.testing.assert_close(
        whole.token_embedding.weight.grad, untied.head.weight.grad + untied.token_embedding.weight.grad
    )
    assert "head" not in whole.groups()


@pytest.mark.parametrize(("scale", "factor"), [("sqrt_d", math.sqrt(8)), (3.0, 3.0)])
def test_embedding_scale_multiplies_what_enters_the_first_block(scale, factor):
    plain, scaled, seen = model_of(), model_of(embedding_scale=scale), []
    for model in (plain, scaled):
        model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(batch()[0])
    torch.testing.assert_close(seen[1], factor * seen[0])


def test_embedding_norm_normalizes_what_enters_the_first_block():
    model, seen = model_of(embedding_norm=True), []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(batch()[0])
    torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(3, 5), rtol=0.05, atol=0)
    assert model.input_norm.weight in set(model.groups()["embedding"])


# --- observing -------------------------------------------------------------------------------------


def test_observations_are_what_their_names_say():
    model, (inputs, targets) = model_of(block={"name": "pre", "init": "xavier"}), batch()
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: streams.append(out))
    model.observe(True)
    model.loss(inputs, targets)
    seen = model.observations()
    assert set(seen) == {"attn_logit_max", "act_rms/block0", "act_rms/block1"}
    assert all(v.shape == () and v.dtype == torch.float32 and not v.requires_grad for v in seen.values())
    for i, stream in enumerate(streams):
        torch.testing.assert_close(seen[f"act_rms/block{i}"], stream.detach().square().mean().sqrt())
    assert seen["attn_logit_max"] == max(block.attention.observed_max for block in model.blocks)


@pytest.mark.parametrize("relaxation", ["none", "qk_clip", "softcap"])
def test_observing_changes_no_bit_and_ends_when_told(relaxation):
    watched, plain, (inputs, targets) = (
        model_of(relaxation=relaxation),
        model_of(relaxation=relaxation),
        batch(),
    )
    watched.observe(True)
    for model in (watched, plain):
        model.loss(inputs, targets)[0].backward()
    assert watched.observations()
    assert plain.observations() == {}
    for p, q in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    watched.observe(False)
    watched(inputs)
    assert watched.observations() == {}


# --- the config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "rmss"}, r"unknown norm 'rmss', did you mean 'rms'\?; known: dyt, layer, none, rms, scale"),
        ({"block": {"name": "pre", "alpha": 2}}, r"unknown option of block 'pre' 'alpha'.*known: init"),
        ({"relaxation": "pb"}, r"unknown relaxation 'pb'.*known: none, pb_relax, qk_clip"),
        ({"scores": "fp16"}, r"unknown score type 'fp16'.*known: bfloat16, float16, float32"),
        ({"d_model": 10, "num_heads": 4}, r"d_model 10 does not divide into num_heads 4"),
        ({"num_layers": 0}, r"num_layers 0; must be at least 1"),
        ({"d_ff": -1}, r"d_ff -1"),
        ({"z_loss": -1e-4}, r"z_loss -0.0001"),
        ({"logit_softcap": math.inf}, r"logit_softcap inf"),
        ({"embedding_grad_scale": math.nan}, r"embedding_grad_scale nan"),
        ({"embedding_scale": "sqrt"}, r"embedding_scale 'sqrt'"),
        ({"embedding_scale": 0.0}, r"embedding_scale 0.0"),
        ({"embedding_norm": True, "norm": "none"}, r"embedding_norm on with norm none"),
    ],
    ids=str,
)
def test_bad_configs_say_what_was_given_and_what_is_known(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="unknown precision 'fp8'"):
        no_op_reasons(ModelConfig(), "fp8")


def test_config_holds_the_documented_defaults():
    config = ModelConfig()
    assert config.ff_width == 192
    assert no_op_reasons(config, "fp32") == []
    model = Transformer(config)
    assert not any("bias" in name for name, p in model.named_parameters() if p.dim() > 1)


def test_models_import_neither_ray_nor_the_service():
    code = (
        "import sys, models.transformer; print([m for m in ('ray', 'service', 'study') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

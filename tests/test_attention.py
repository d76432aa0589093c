"""Relaxations against their formulas in float64, and what happens where scores overflow."""

import math

import model_oracles as oracle
import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from models.attention import RELAXATIONS, SigmaLinear
from models.scores import Relaxation
from models.sublayers import MLP, Attention
from models.transformer import ModelConfig, Transformer, no_op_reasons
from models.variants import build

# Every entry with its defaults, and the options that change a formula.
SPECS = [
    *RELAXATIONS,
    {"name": "none", "scale": "post"},
    {"name": "pb_relax", "alpha": 3.0},
    {"name": "pb_relax", "form": "post_matmul"},
    {"name": "smoothing", "gamma": 0.4},
    {"name": "softcap", "cap": 0.7},
    {"name": "qk_norm", "kind": "rms"},
    {"name": "sigma_reparam", "mlp": False},
    {"name": "temperature", "temperature": 0.3},
    {"name": "temperature", "temperature": 3.0, "learnable": True},
]
SPEC_IDS = [s if isinstance(s, str) else "-".join(map(str, s.values())) for s in SPECS]


def layer(spec, causal=True, seed=0, **changes):
    """An attention layer with logits of order one, in float64, relaxation attached."""
    config = oracle.tiny(relaxation=spec, causal=causal, **changes)
    torch.manual_seed(seed)
    attention = Attention(config)
    attention.relaxation.attach(attention, MLP(config))
    return oracle.randomize(attention, seed).double()


def inputs(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def settle_sigma(attention):
    """Let power iteration find the largest singular values of the randomized matrices."""
    for linear in attention.children():
        if hasattr(linear, "gain"):
            for _ in range(400):
                linear(torch.zeros(1, linear.weight.shape[1], dtype=linear.weight.dtype))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_relaxation_equals_its_formula_in_float64(spec, causal):
    attention, x = layer(spec, causal), inputs(2, 5, 8)
    settle_sigma(attention)
    torch.testing.assert_close(attention(x), oracle.attention(attention, x, causal), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_gradients_of_a_relaxation_are_its_derivatives(spec):
    attention = layer(spec).eval()  # in training, sigma's power iteration would move between evaluations
    names, parameters = zip(*attention.named_parameters(), strict=True)

    def call(x, *values):
        return functional_call(attention, dict(zip(names, values, strict=True)), (x,))

    leaves = [p.detach().clone().requires_grad_() for p in parameters]
    assert gradcheck(call, (inputs(1, 3, 8).requires_grad_(), *leaves))


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in ("none", "qk_clip", "pb_relax")], ids=str)
def test_relaxation_is_shown_to_run(spec):
    """Same weights, another output than plain attention; else the class must say why."""
    plain, relaxed, x = layer("none"), layer(spec), inputs(2, 5, 8)
    relaxed.load_state_dict(plain.state_dict(), strict=False)
    if type(relaxed.relaxation) is RELAXATIONS["sigma_reparam"]:
        assert all(
            hasattr(linear, "gain") for linear in (relaxed.query, relaxed.key, relaxed.value, relaxed.out)
        )
        return
    differs = not torch.allclose(relaxed(x), plain(x), rtol=1e-6)
    assert differs != bool(no_op_reasons(oracle.tiny(relaxation=spec), "fp32"))


# --- storage of scores -------------------------------------------------------------------------


def attend(spec, q, k, scores="float16", size=64):
    """Attention weights through the explicit path's two seams."""
    config = ModelConfig(d_model=size, num_heads=1, relaxation=spec, scores=scores)
    relaxation = build("relaxation", RELAXATIONS, spec, config)
    return relaxation.weights(relaxation.scores(q, k, 1 / math.sqrt(size)), None)


def crafted(largest, size=64, length=128):
    """Queries and keys, exact in float16, whose largest |q.k| / sqrt(size) is about `largest`."""
    q, k = inputs(1, 1, length, size, seed=3), inputs(1, 1, length, size, seed=4)
    factor = math.sqrt(largest / ((q @ k.mT).abs().max() / math.sqrt(size)))
    return (q * factor).half().float(), (k * factor).half().float()


def exact(q, k):
    return torch.softmax((q.double() @ k.double().mT) / math.sqrt(q.shape[-1]), dim=-1)


PRE, POST = {"name": "pb_relax", "form": "pre_matmul"}, {"name": "pb_relax", "form": "post_matmul"}


def test_only_the_pre_matmul_form_survives_logits_beyond_float16():
    q, k = crafted(8.6e4)
    assert not attend("none", q, k).isfinite().all()
    assert not attend(POST, q, k).isfinite().all()
    relaxed = attend(PRE, q, k)
    assert relaxed.isfinite().all()
    # Float16 keeps 11 bits of a score, so only rows whose winner is clear can be held to the truth:
    # a row's two best must lie further apart than the spacing of stored scores (32 * 2) and some nats.
    best = ((q.double() @ k.double().mT) / 8).topk(2).values
    clear = (best[..., 0] - best[..., 1]) > 150
    assert clear.sum() > 100
    torch.testing.assert_close(relaxed[clear].double(), exact(q, k)[clear], rtol=0, atol=1e-3)


def test_a_smaller_alpha_protects_less():
    q, k = crafted(8.6e4)
    assert not attend({"name": "pb_relax", "alpha": 1.0}, q, k).isfinite().all()
    assert attend({"name": "pb_relax", "alpha": 2.0}, q, k).isfinite().all()


def test_unscaled_product_overflows_first():
    q, k = crafted(1.1e4)
    assert not attend({"name": "none", "scale": "post"}, q, k).isfinite().all()
    for spec in ("none", PRE, POST):
        assert attend(spec, q, k).isfinite().all()


@pytest.mark.parametrize("scores", ["float32", "bfloat16"])
def test_wider_scores_do_not_overflow_there(scores):
    q, k = crafted(8.6e4)
    for spec in ("none", {"name": "none", "scale": "post"}, PRE, POST):
        assert attend(spec, q, k, scores).isfinite().all()


@pytest.mark.parametrize("scores", ["bfloat16", "float16"])
@pytest.mark.parametrize("alpha", [1.0, 2.0, 32.0])
def test_relaxed_scores_of_ordinary_size_equal_plain_scores_to_storage_rounding(scores, alpha):
    """Scaling by powers of two is exact; the stored difference to the maximum is the one rounding more."""
    q, k = crafted(4.0)
    plain, relaxed = attend("none", q, k, scores), attend({"name": "pb_relax", "alpha": alpha}, q, k, scores)
    epsilon = torch.finfo(getattr(torch, scores)).eps
    torch.testing.assert_close(relaxed, plain, rtol=8 * epsilon, atol=0)


def test_scores_are_stored_in_the_type_asked_for():
    config = oracle.tiny(scores="bfloat16")
    relaxation = build("relaxation", RELAXATIONS, "none", config)
    q, k = inputs(1, 2, 5, 4, dtype=torch.float32), inputs(1, 2, 5, 4, seed=2, dtype=torch.float32)
    stored = relaxation.scores(q, k, 0.5)
    assert torch.equal(stored, stored.bfloat16().float())
    by_hand = ((q * 0.5).bfloat16().float() @ k.bfloat16().float().mT).bfloat16().float()
    assert torch.equal(stored, by_hand)
    weights = relaxation.weights(stored, None)
    assert torch.equal(weights, torch.softmax(stored, -1).bfloat16().float())


def test_rounding_lets_gradients_pass_unrounded():
    x = torch.full((3,), 1.0001, requires_grad=True)
    relaxation = build("relaxation", RELAXATIONS, "none", oracle.tiny(scores="float16"))
    (gradient,) = torch.autograd.grad(relaxation.stored(x), x, torch.full((3,), 1e-12))
    assert torch.equal(gradient, torch.full((3,), 1e-12))


# --- the arm that must be a no-op ----------------------------------------------------------------


def losses_and_gradients(relaxation, steps=5, explicit=None):
    torch.manual_seed(0)
    model = Transformer(oracle.tiny(relaxation=relaxation))
    if explicit is not None:
        for block in model.blocks:
            block.attention.explicit = explicit
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 11, (steps, 3, 6), generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in tokens:
        optimizer.zero_grad()
        objective, _ = model.loss(batch[:, :-1], batch[:, 1:])
        objective.backward()
        optimizer.step()
        losses.append(objective.detach())
    return torch.stack(losses), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("form", ["pre_matmul", "post_matmul"])
@pytest.mark.parametrize("alpha", [1.0, 2.0, 32.0])
def test_relaxation_is_bitwise_plain_at_powers_of_two(alpha, form):
    """In float32, against plain attention on the same explicit path: losses and gradients of 5 steps."""
    relaxed = losses_and_gradients({"name": "pb_relax", "alpha": alpha, "form": form})
    plain = losses_and_gradients("none", explicit=True)
    assert torch.equal(relaxed[0], plain[0])
    assert torch.equal(relaxed[1], plain[1])


@pytest.mark.parametrize("alpha", [1.0, 2.0, 32.0, 10.0])
def test_relaxed_training_equals_plain_training_to_rounding(alpha):
    relaxed, plain = losses_and_gradients({"name": "pb_relax", "alpha": alpha}), losses_and_gradients("none")
    torch.testing.assert_close(relaxed[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(relaxed[1], plain[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_op_is_said_exactly_where_it_is_one(precision):
    def said(spec, scores):
        return no_op_reasons(ModelConfig(relaxation=spec, scores=scores), precision)

    for scores in ("float32", "bfloat16"):
        for spec in (PRE, POST):
            assert "alpha 32" in said(spec, scores)[0]
            assert scores in said(spec, scores)[0]
    assert said(PRE, "float16") == []
    assert "unprotective" in said(POST, "float16")[0]
    assert said({"name": "none", "scale": "post"}, "float32")
    assert not said({"name": "none", "scale": "post"}, "float16")
    for spec in ("none", "softcap", "smoothing", "qk_norm", "sigma_reparam", "temperature", "qk_clip"):
        assert said(spec, "float32") == []
    for spec in (
        {"name": "smoothing", "gamma": 0.0},
        {"name": "temperature", "temperature": 1.0},
        {"name": "qk_norm", "kind": "none"},
    ):
        assert len(said(spec, "float32")) == 1


# --- single variants -----------------------------------------------------------------------------


def test_smoothing_spreads_over_visible_keys_only_and_rests_in_evaluation():
    attention, x = layer({"name": "smoothing", "gamma": 1.0}), inputs(1, 5, 8)
    values = x @ attention.value.weight.T
    uniform = torch.stack([values[0, : i + 1].mean(0) for i in range(5)])[None]
    torch.testing.assert_close(attention(x), uniform @ attention.out.weight.T)
    plain = layer("none").eval()
    torch.testing.assert_close(attention.eval()(x), plain(x))
    always = layer({"name": "smoothing", "gamma": 1.0, "evaluation": True}).eval()
    torch.testing.assert_close(always(x), uniform @ attention.out.weight.T)


def test_softcap_bounds_scores_and_comes_before_the_mask():
    attention = layer({"name": "softcap", "cap": 2.0})
    scores = attention.relaxation.scores(100 * inputs(1, 2, 5, 4), inputs(1, 2, 5, 4, seed=2), 1.0)
    assert scores.abs().max() <= 2.0
    x = inputs(1, 5, 8)
    changed = torch.cat([x[:, :-1], 50 + x[:, -1:]], dim=1)
    assert torch.equal(attention(x)[:, :-1], attention(changed)[:, :-1])


def test_qk_norm_bounds_logits_whatever_the_length_of_queries():
    attention = layer("qk_norm")
    attention.relaxation.query_norm.reset_parameters()
    attention.relaxation.key_norm.reset_parameters()
    attention.watch = True
    attention(1e6 * inputs(2, 5, 8))
    assert attention.observed_max <= math.sqrt(4) + 1e-6  # |q| = |k| = sqrt(4), times 1 / sqrt(4)


def test_qk_norm_shares_its_parameters_across_heads():
    assert layer("qk_norm").relaxation.query_norm.weight.shape == (4,)


def test_temperature_defaults_to_mup():
    attention = layer("temperature")
    assert attention.scale == pytest.approx(1 / 4)  # 1 / d_head
    learned = layer({"name": "temperature", "learnable": True}).relaxation
    assert learned.inverse_H.shape == (2,)


@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (8, 12)])
def test_sigma_reparam_starts_at_the_matrix_it_found(shape):
    linear = torch.nn.Linear(shape[1], shape[0], bias=False)
    original = linear.weight.detach().clone()
    wrapped = SigmaLinear(linear)
    sigma = torch.linalg.svdvals(original)[0]
    torch.testing.assert_close(wrapped.gain.detach(), sigma, rtol=1e-5, atol=0)
    torch.testing.assert_close(wrapped(torch.eye(shape[1])).T, original, rtol=1e-4, atol=1e-5)


def test_sigma_reparam_covers_the_mlp_only_when_asked():
    for mlp, kinds in ((True, 6), (False, 4)):
        model = Transformer(oracle.tiny(relaxation={"name": "sigma_reparam", "mlp": mlp}))
        assert sum(name.endswith(".gain") for name, _ in model.named_parameters()) == kinds * 2


def test_power_iteration_moves_in_training_only_and_is_saved():
    attention, x = layer("sigma_reparam"), inputs(1, 3, 8)
    start = attention.query.u.clone()
    attention.eval()(x)
    assert torch.equal(attention.query.u, start)
    attention.train()(x)
    assert not torch.equal(attention.query.u, start)
    other = layer("sigma_reparam", seed=5)
    other.load_state_dict(attention.state_dict())
    assert torch.equal(attention(x), other(x))
    assert torch.equal(attention(x), other(x))


# --- qk_clip -------------------------------------------------------------------------------------


def loud_head(tau):
    """A layer whose head 1 has logits far above tau and whose head 0 stays below."""
    attention = layer({"name": "qk_clip", "tau": tau})
    with torch.no_grad():
        attention.query.weight[4:] *= 40
    return attention


def largest_logits(attention, x):
    """By head, over batch and visible pairs, from the definition."""
    largest = torch.full((2,), -math.inf, dtype=torch.float64)
    for row in x:
        q, k = row @ attention.query.weight.T, row @ attention.key.weight.T
        for h in range(2):
            for i in range(len(row)):
                s = k[: i + 1, 4 * h : 4 * h + 4] @ q[i, 4 * h : 4 * h + 4] / 2
                largest[h] = torch.maximum(largest[h], s.max())
    return largest.detach()


def test_qk_clip_brings_the_loud_head_to_tau_and_leaves_the_other_bitwise_alone():
    attention, x = loud_head(tau=5.0), inputs(2, 5, 8)
    before = {name: p.detach().clone() for name, p in attention.named_parameters()}
    loud = largest_logits(attention, x)
    assert loud[0] < 5 < loud[1]
    attention(x)
    attention.relaxation.after_step(attention)
    for name in ("query.weight", "key.weight"):
        now = dict(attention.named_parameters())[name]
        assert torch.equal(now[:4], before[name][:4])
        torch.testing.assert_close(now[4:], before[name][4:] * (5 / loud[1]).sqrt(), rtol=1e-6, atol=0)
    assert torch.equal(attention.value.weight, before["value.weight"])
    assert torch.equal(attention.out.weight, before["out.weight"])
    torch.testing.assert_close(largest_logits(attention, x)[1].item(), 5.0, rtol=1e-6, atol=0)


def test_qk_clip_takes_the_largest_of_all_micro_batches_and_starts_anew_after_the_step():
    x = inputs(2, 5, 8)
    together, apart = loud_head(5.0), loud_head(5.0)
    together(x)
    apart(x[:1])
    apart(x[1:])
    assert torch.equal(together.relaxation.logit_max_H, apart.relaxation.logit_max_H)
    apart.relaxation.after_step(apart)
    assert (apart.relaxation.logit_max_H == -math.inf).all()
    weight = apart.query.weight.detach().clone()
    apart.relaxation.after_step(apart)
    assert torch.equal(apart.query.weight, weight)


def test_qk_clip_ignores_evaluation_and_logits_that_are_not_finite():
    attention, x = loud_head(5.0), inputs(2, 5, 8)
    attention.eval()(x)
    assert (attention.relaxation.logit_max_H == -math.inf).all()
    weight = attention.query.weight.detach().clone()
    attention.relaxation.logit_max_H.copy_(torch.tensor([math.inf, math.nan]))
    attention.relaxation.after_step(attention)
    assert torch.equal(attention.query.weight, weight)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "none", "scale": "after"},
        {"name": "pb_relax", "alpha": 0.0},
        {"name": "pb_relax", "form": "mid_matmul"},
        {"name": "smoothing", "gamma": 1.5},
        {"name": "softcap", "cap": 0.0},
        {"name": "temperature", "temperature": -1.0},
        {"name": "qk_clip", "tau": 0.0},
        {"name": "qk_norm", "kind": "rmss"},
    ],
    ids=str,
)
def test_bad_option_values_are_refused_by_name(spec):
    with pytest.raises(ValueError, match=r"relaxation"):
        ModelConfig(relaxation=spec)


def test_every_relaxation_is_a_relaxation_with_its_own_formula():
    for variant in RELAXATIONS.values():
        assert issubclass(variant, Relaxation)
        assert variant.__doc__ != Relaxation.__doc__

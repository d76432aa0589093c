"""Placements against their formulas in float64, the constants they start from, and theory at init."""

import math
import statistics

import model_oracles as oracle
import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from models.blocks import BLOCKS
from models.inits import (
    deepnorm_constants,
    deepnorm_encoder_decoder_constants,
    layerscale_value,
    magneto_gain,
)
from models.norms import NORMS
from models.transformer import ModelConfig, Transformer, no_op_reasons
from models.variants import options_of

MATRICES = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.up", "mlp.down")


def model_of(block, seed=0, **changes):
    torch.manual_seed(seed)
    return Transformer(oracle.tiny(block=block, **changes))


def inputs(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", BLOCKS)
def test_placement_equals_its_formula_in_float64(name, causal, norm):
    changes = {} if name in ("rezero", "ngpt") else {"norm": norm}
    model = oracle.randomize(model_of(name, causal=causal, num_layers=3, **changes)).double()
    x = inputs(2, 5, 8) if name != "ngpt" else oracle.unit(inputs(2, 5, 8))
    for index, block in enumerate(model.blocks):
        expected = oracle.block(name, block, x, model.config, index)
        torch.testing.assert_close(block(x), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_of_a_placement_are_its_derivatives(name):
    block = oracle.randomize(model_of(name, d_model=4, d_ff=5)).blocks[1].double()
    names, parameters = zip(*block.named_parameters(), strict=True)

    def call(x, *values):
        return functional_call(block, dict(zip(names, values, strict=True)), (x,))

    leaves = [p.detach().clone().requires_grad_() for p in parameters]
    assert gradcheck(call, (inputs(1, 2, 4).requires_grad_(), *leaves))


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - {"pre"}))
def test_placement_is_shown_to_run(name):
    """The same matrices give another function than under pre."""
    norm = "none" if name in ("rezero", "ngpt") else "layer"
    placed = oracle.randomize(model_of(name), std=0.1)
    pre = model_of("pre", norm=norm)
    pre.load_state_dict(placed.state_dict(), strict=False)
    tokens = torch.arange(5)[None]
    assert not torch.allclose(placed(tokens), pre(tokens), rtol=1e-2, atol=1e-2)


def test_what_comes_before_the_first_block_and_after_the_last():
    """Pre-like stacks end in a norm, post-like ones have had theirs; peri normalizes its input too."""
    for name in BLOCKS:
        model = model_of(name)
        ends = type(model.final_norm).__name__, type(model.input_norm).__name__
        expected = {
            **dict.fromkeys(("post", "deepnorm", "rezero"), ("Identity", "Identity")),
            "ngpt": ("Identity", "Unit"),
            "peri": ("LayerNorm", "LayerNorm"),
        }
        assert ends == expected.get(name, ("LayerNorm", "Identity"))


# --- constants and inits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "alpha", "beta"),
    [
        (6, 1.8612, 0.3799),
        (12, 2.2134, 0.3195),
        (24, 2.6321, 0.2686),
        (50, 3.1623, 0.2236),
        (100, 3.7606, 0.1880),
    ],
)
def test_deepnorm_constants_are_the_papers(layers, alpha, beta):
    assert deepnorm_constants(layers) == pytest.approx((alpha, beta), abs=5e-5)


def test_deepnorm_encoder_decoder_constants_are_the_papers():
    encoder, decoder = deepnorm_encoder_decoder_constants(6, 6)
    assert encoder == pytest.approx((1.4179, 0.4970), abs=5e-5)
    assert decoder == pytest.approx((2.0598, 0.3433), abs=5e-5)
    assert deepnorm_encoder_decoder_constants(12, 6)[1] == decoder


def stds(block, **changes):
    """Standard deviation of each matrix of the last block of a finished model, wide enough to measure."""
    model = model_of(block, d_model=64, d_ff=256, num_layers=6, num_heads=4, vocab_size=300, **changes)
    return {name: model.get_parameter(f"blocks.5.{name}.weight").std().item() for name in MATRICES}


XAVIER = dict.fromkeys(MATRICES[:4], math.sqrt(2 / 128)) | dict.fromkeys(MATRICES[4:], math.sqrt(2 / 320))
GPT2 = dict.fromkeys(MATRICES, 0.02)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("block", "gain"), [("deepnorm", 48**-0.25), ("sub", math.sqrt(math.log(12)))], ids=["deepnorm", "sub"]
)
def test_gain_touches_all_matrices_but_query_and_key_after_all_other_init(block, gain, norm):
    expected = {name: std * (1 if name in MATRICES[:2] else gain) for name, std in XAVIER.items()}
    assert stds(block, norm=norm) == pytest.approx(expected, rel=0.05)


def test_own_inits_are_the_documented_ones():
    divided = GPT2 | dict.fromkeys(("attention.out", "mlp.down"), 0.02 / math.sqrt(12))
    for block in ("pre", "ln_scaling", "layerscale", {"name": "post", "init": "gpt2"}):
        assert stds(block) == pytest.approx(divided, rel=0.05)
    for block in ("sandwich", "peri", "reordered"):
        assert stds(block) == pytest.approx(GPT2, rel=0.05)
    for block in (
        "post",
        {"name": "rezero"},
        {"name": "pre", "init": "xavier"},
        {"name": "peri", "init": "xavier"},
    ):
        assert stds(block) == pytest.approx(XAVIER, rel=0.05)


def test_ends_start_alike_under_every_placement_but_ngpt():
    for name in sorted(set(BLOCKS) - {"ngpt"}):
        model = model_of(name, vocab_size=300, d_model=64, context_length=200)
        for part in (model.token_embedding, model.position_embedding, model.head):
            assert part.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_magneto_gain_is_the_papers():
    assert magneto_gain(12) == pytest.approx(math.sqrt(math.log(24)))
    assert magneto_gain(12) == pytest.approx(1.7827, abs=5e-5)


def test_ln_scaling_counts_layers_from_one():
    model = model_of("ln_scaling", num_layers=4)
    assert [b.norm_gain for b in model.blocks] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])


def test_layerscale_starts_by_depth_or_as_told():
    assert [layerscale_value(n) for n in (18, 19, 24, 25)] == [0.1, 1e-5, 1e-5, 1e-6]
    assert torch.equal(model_of("layerscale").blocks[0].mlp_scale, torch.full((8,), 0.1))
    given = model_of({"name": "layerscale", "value": 0.5}).blocks[1]
    assert torch.equal(given.attention_scale, torch.full((8,), 0.5))


def test_rezero_starts_as_the_identity_with_one_scalar_a_layer():
    block = model_of("rezero").blocks[0]
    x = inputs(1, 5, 8).float()
    assert torch.equal(block(x), x)
    assert block.alpha.shape == ()


@pytest.mark.parametrize("name", ["deepnorm", "sub", "ngpt"])
def test_init_is_no_option_where_the_placement_prescribes_it(name):
    assert "init" not in options_of(BLOCKS[name])
    assert "init" in options_of(BLOCKS["pre"])


# --- nGPT ------------------------------------------------------------------------------------------


def sphere_lengths(model):
    """Lengths of all vectors along d_model, of every matrix but the positions."""
    lengths = [model.token_embedding.weight.norm(dim=1), model.head.weight.norm(dim=1)]
    for block in model.blocks:
        lengths += [block.get_parameter(f"{m}.weight").norm(dim=1) for m in (*MATRICES[:3], "mlp.up")]
        lengths += [block.get_parameter(f"{m}.weight").norm(dim=0) for m in ("attention.out", "mlp.down")]
    return torch.cat(lengths)


@pytest.mark.parametrize("tied", [False, True])
def test_ngpt_puts_its_matrices_on_the_sphere_at_init_and_after_each_step(tied):
    model = model_of("ngpt", tie_embeddings=tied)
    one = torch.ones_like(sphere_lengths(model))
    torch.testing.assert_close(sphere_lengths(model), one)
    tokens = torch.arange(5)[None]
    model.loss(tokens, tokens)[0].backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.allclose(sphere_lengths(model), one)
    model.after_step()
    torch.testing.assert_close(sphere_lengths(model), one)


def test_ngpt_keeps_hidden_states_on_the_sphere_and_its_constants():
    model = model_of("ngpt")
    x = model.input_norm(model._embed(torch.arange(5)[None]))
    for block in model.blocks:
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(1, 5))
        x = block(x)
    block, d = model.blocks[0], 8
    assert block.attention.scale == pytest.approx(math.sqrt(4))
    gains = {
        block.attention_step.rate: (0.05, d**-0.5),
        block.mlp_step.rate: (0.05, d**-0.5),
        block.attention.on_query_key.gain: (1.0, d**-0.5),
        block.mlp.up_gain: (math.sqrt(d), 1.0),
        model.logit_gain: (1.0, d**-0.5),
    }
    for gain, (value, stored) in gains.items():
        torch.testing.assert_close(gain.weight.detach(), torch.full_like(gain.weight, stored))
        torch.testing.assert_close(gain.effective().detach(), torch.full_like(gain.weight, value))
    plain = model.head(x)
    torch.testing.assert_close(model(torch.arange(5)[None]), plain)


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block": "rezero", "norm": "layer"}, "takes norm none"),
        ({"block": "ngpt", "norm": {"name": "rms", "eps": 1e-5}}, "takes norm none"),
        ({"block": "ngpt", "norm": "none", "relaxation": "qk_norm"}, "'qk_norm'"),
        ({"block": "ngpt", "norm": "none", "relaxation": "qk_clip"}, "'qk_clip'"),
        ({"block": "ngpt", "norm": "none", "relaxation": "sigma_reparam"}, "'sigma_reparam'"),
        ({"block": "ngpt", "norm": "none", "embedding_scale": "sqrt_d"}, "normalizes the embedding"),
        ({"block": "peri", "embedding_norm": True}, "already normalizes the embedding"),
        ({"block": {"name": "pre", "init": "he"}}, "unknown init 'he'.*known: gpt2, xavier"),
    ],
    ids=str,
)
def test_combinations_without_sense_are_refused_with_the_reason(changes, reason):
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**changes)


def test_ln_scaling_of_one_layer_says_that_it_is_pre():
    assert "one layer" in no_op_reasons(oracle.tiny(block="ln_scaling", num_layers=1), "fp32")[0]
    assert no_op_reasons(oracle.tiny(block="ln_scaling"), "fp32") == []
    torch.manual_seed(0)
    pre = Transformer(oracle.tiny(num_layers=1))
    torch.manual_seed(0)
    scaled = Transformer(oracle.tiny(num_layers=1, block="ln_scaling"))
    tokens = torch.arange(5)[None]
    assert torch.equal(pre(tokens), scaled(tokens))


# --- theory at init --------------------------------------------------------------------------------

PRE_XAVIER = {"name": "pre", "init": "xavier"}
SEEDS = range(10)


def at_init(block, layers, width):
    """By seed: norms of each block's mlp.down gradient, and mean squares of the stream after it."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        config = ModelConfig(
            vocab_size=64, d_model=width, num_layers=layers, num_heads=2, context_length=16, block=block
        )
        model = Transformer(config)
        model.observe(True)
        model.loss(torch.randint(0, 64, (4, 16)), torch.randint(0, 64, (4, 16)))[0].backward()
        squares = [model.observations()[f"act_rms/block{i}"].item() ** 2 for i in range(layers)]
        yield [b.mlp.down.weight.grad.norm().item() for b in model.blocks], squares


def mean_over_seeds(block, layers, width, what):
    return [
        statistics.mean(column)
        for column in zip(*(s[what] for s in at_init(block, layers, width)), strict=True)
    ]


def slope(xs, ys):
    return statistics.linear_regression(xs, ys).slope


def test_last_mlp_gradient_does_not_depend_on_depth_under_post_and_falls_as_its_root_under_pre():
    """F1: Xiong et al. 2020, Theorem 1, at Xavier init; the exponents are 0 and -1/2."""
    depths = [2, 4, 8, 16]
    logs = [math.log(d) for d in depths]

    def exponent(block):
        return slope(logs, [math.log(mean_over_seeds(block, d, 32, what=0)[-1]) for d in depths])

    assert abs(exponent("post")) < 0.1
    assert -0.7 < exponent(PRE_XAVIER) < -0.4


def test_post_sends_more_of_its_gradient_to_the_output_side_than_pre():
    """F2 as an order: from first to last of 12 blocks, d 64, post keeps its gradient, pre loses most."""
    post, pre = (mean_over_seeds(block, 12, 64, what=0) for block in ("post", PRE_XAVIER))
    assert post[-1] / post[0] > 2.5 * pre[-1] / pre[0]
    flat = mean_over_seeds("pre", 12, 64, what=0)  # pre as it ships: flat within a third
    assert max(flat) / min(flat) < 1.33


def test_hidden_norm_grows_linearly_with_depth_under_pre_and_not_at_all_under_post():
    """F3: Xiong et al. 2020, Lemma 2."""
    squares = mean_over_seeds(PRE_XAVIER, 12, 64, what=1)
    fit = statistics.linear_regression(range(12), squares)
    residuals = [abs(s - fit.intercept - fit.slope * i) for i, s in enumerate(squares)]
    assert fit.slope > 0.5
    assert max(residuals) < 0.05 * squares[-1]
    assert mean_over_seeds("post", 12, 64, what=1) == pytest.approx([1.0] * 12, rel=1e-3)

"""The explicit path against torch's fused attention, and what a forward can be asked to observe."""

import math

import model_oracles as oracle
import pytest
import torch

from models.sublayers import MLP, Attention


def both_paths(causal, dtype=torch.float32):
    torch.manual_seed(0)
    fused = oracle.randomize(Attention(oracle.tiny(causal=causal, context_length=40))).to(dtype)
    explicit = oracle.randomize(Attention(oracle.tiny(causal=causal, context_length=40))).to(dtype)
    explicit.load_state_dict(fused.state_dict())
    explicit.explicit = True
    assert not fused.explicit
    return fused, explicit


@pytest.mark.parametrize("causal", [True, False])
def test_explicit_path_equals_fused_attention_with_gradients(causal):
    results = []
    for attention in both_paths(causal):
        x = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = attention(x)
        (y * torch.arange(8)).square().mean().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in attention.parameters())])
    for fused, explicit in zip(*results, strict=True):
        torch.testing.assert_close(explicit, fused, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scores", ["bfloat16", "float16"])
def test_half_precision_scores_take_the_explicit_path_and_stay_close(scores):
    torch.manual_seed(0)
    plain = Attention(oracle.tiny())
    stored = Attention(oracle.tiny(scores=scores))
    stored.load_state_dict(plain.state_dict())
    assert stored.explicit
    x = torch.randn(2, 5, 8)
    assert not torch.equal(stored(x), plain(x))
    torch.testing.assert_close(stored(x), plain(x), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "relaxation", ["pb_relax", {"name": "none", "scale": "post"}], ids=["pb_relax", "post"]
)
def test_autocast_does_not_reach_the_stored_scores(relaxation):
    """Under float16 autocast logits far beyond float16 stay finite, as float32 scores promise."""
    torch.manual_seed(0)
    attention = Attention(oracle.tiny(relaxation=relaxation))
    with torch.no_grad():
        attention.query.weight.mul_(5e3)
        attention.key.weight.mul_(5e3)
        attention.watch = True
        with torch.autocast("cpu", torch.float16):
            assert attention(torch.randn(1, 5, 8)).isfinite().all()
    assert 100 * 65504 < attention.observed_max < math.inf


@pytest.mark.parametrize("causal", [True, False])
def test_observed_maximum_leaves_masked_pairs_out(causal):
    torch.manual_seed(0)
    attention = oracle.randomize(Attention(oracle.tiny(causal=causal))).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    attention.watch = True
    attention(x)
    largest = -math.inf
    for row in x:
        q, k = row @ attention.query.weight.T, row @ attention.key.weight.T
        for i in range(5):
            for j in range(i + 1 if causal else 5):
                for h in (slice(0, 4), slice(4, 8)):
                    largest = max(largest, (q[i, h] @ k[j, h]).item() / 2)
    assert attention.observed_max.item() == pytest.approx(largest, rel=1e-6)
    assert attention.observed_max.dtype == torch.float32
    assert not attention.observed_max.requires_grad


@pytest.mark.parametrize("causal", [True, False])
def test_mlp_equals_its_formula(causal):
    torch.manual_seed(0)
    mlp, x = MLP(oracle.tiny(causal=causal)).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), oracle.mlp(mlp, x), rtol=1e-12, atol=1e-12)

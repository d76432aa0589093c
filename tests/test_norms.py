"""Norms against their formulas in float64, their gradients, and what each does and doesn't ignore."""

import math

import model_oracles as oracle
import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from models.norms import NORMS
from models.variants import build

WIDTH = 6


def make(name, **options):
    return oracle.randomize(build("norm", NORMS, {"name": name, **options}, WIDTH)).double()


def rows(*shape, seed=1):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NORMS)
def test_norm_equals_its_formula_in_float64(name):
    norm, x = make(name), 3 * rows(2, 4) + 1
    torch.testing.assert_close(norm(x), oracle.norm(norm, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_a_norm_are_its_derivatives(name):
    norm = make(name)
    names, parameters = zip(*norm.named_parameters(), strict=True) if list(norm.parameters()) else ((), ())

    def call(x, *values):
        return functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    leaves = [p.detach().clone().requires_grad_() for p in parameters]
    assert gradcheck(call, (rows(3).requires_grad_(), *leaves))


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_eps_is_added_under_the_root(name):
    norm = build("norm", NORMS, {"name": name, "eps": 0.5}, WIDTH).double()
    x = rows(3)
    torch.testing.assert_close(norm(x), oracle.norm(norm, x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(norm(x), build("norm", NORMS, name, WIDTH).double()(x), rtol=1e-2)


def test_layer_norm_is_torchs_and_starts_with_torchs_eps():
    norm, x = NORMS["layer"](WIDTH), rows(4).float()
    assert torch.equal(norm(x), torch.nn.LayerNorm(WIDTH)(x))
    assert norm.eps == 1e-5


def test_rms_norm_has_the_eps_of_its_source_and_sees_a_shift():
    norm, x = NORMS["rms"](WIDTH).double(), rows(4)
    assert norm.eps == 1e-6
    assert not torch.allclose(norm(x), norm(x + 1), rtol=1e-3)
    layer = NORMS["layer"](WIDTH).double()
    torch.testing.assert_close(layer(x), layer(x + 1))


def test_scale_norm_starts_at_the_length_of_a_unit_variance_row():
    norm = NORMS["scale"](WIDTH).double()
    lengths = norm(7 * rows(5)).norm(dim=-1)
    torch.testing.assert_close(
        lengths, torch.full((5,), math.sqrt(WIDTH), dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_scale_norm_of_zero_is_zero():
    assert torch.equal(NORMS["scale"](WIDTH)(torch.zeros(2, WIDTH)), torch.zeros(2, WIDTH))


def test_dyt_starts_at_its_alpha_and_stays_within_its_gain():
    norm = build("norm", NORMS, {"name": "dyt", "alpha": 0.8}, WIDTH).double()
    x = rows(3)
    torch.testing.assert_close(norm(x), torch.tanh(0.8 * x), rtol=1e-6, atol=1e-7)
    assert norm(1e6 * x).abs().max() <= 1
    assert NORMS["dyt"](WIDTH).alpha.item() == 0.5


def test_no_norm_returns_its_input_and_has_no_parameters():
    norm, x = NORMS["none"](WIDTH), rows(2)
    assert norm(x) is x
    assert not list(norm.parameters())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["layer", "rms", "scale", "dyt"])
def test_half_precision_input_is_computed_in_float32(name, half):
    """Squares of 3e4 overflow float16; the result is that of the same values in float32, unrounded."""
    x, norm = (1e4 * rows(4)).to(half), oracle.randomize(NORMS[name](WIDTH))
    with torch.autocast("cpu", half):
        y = norm(x)
    torch.testing.assert_close(y, norm(x.float()), rtol=1e-5, atol=1e-6)


def test_jacobian_of_layer_norm_shrinks_with_the_length_of_its_input():
    """F5 (Xiong et al., Lemma 3): its norm is O(sqrt(d) / ||x||)."""
    for width in (8, 32, 128):
        norm = NORMS["layer"](width).double()
        x = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
        for length in (1.0, 10.0, 100.0):
            scaled = x / x.norm() * length * math.sqrt(width)
            jacobian = torch.autograd.functional.jacobian(norm, scaled)
            bound = math.sqrt(width) / scaled.norm()
            assert 0.5 * bound < torch.linalg.matrix_norm(jacobian, 2) < 2 * bound

"""The lookup that all tables share, and that a new variant needs one class and one line only."""

import dataclasses

import model_oracles as oracle
import pytest
import torch
from torch import nn

from models import attention, blocks, norms, sublayers
from models.norms import NORMS
from models.transformer import ModelConfig, Transformer
from models.variants import VariantError, build, check, normalize, options_of, unknown

TABLES = {"norm": norms.NORMS, "block": blocks.BLOCKS, "relaxation": attention.RELAXATIONS}


class HalfNorm(nn.Module):
    """x / 2 + shift: a made-up norm."""

    def __init__(self, width: int, *, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((width,), shift))

    def forward(self, x):
        return x / 2 + self.shift


@pytest.fixture
def made_up():
    """The table of norms with one line more, for the time of a test."""
    NORMS["half"] = HalfNorm
    yield
    del NORMS["half"]


def test_a_made_up_norm_touches_one_table(made_up):
    assert check("norm", NORMS, {"name": "half", "shift": 1.0}) == {"name": "half", "shift": 1.0}
    config = oracle.tiny(norm={"name": "half", "shift": 1.0})
    torch.manual_seed(0)
    model = Transformer(config)
    assert isinstance(model.blocks[0].mlp_norm, HalfNorm)
    assert isinstance(model.final_norm, HalfNorm)
    assert torch.equal(model.final_norm.shift, torch.ones(8))
    assert model.groups()["final_norm"] == [model.final_norm.shift]
    tokens = torch.arange(5)[None]
    objective, _ = model.loss(tokens, tokens)
    objective.backward()
    assert all(p.grad.any() for p in model.parameters())
    with pytest.raises(VariantError, match=r"known: dyt, half, layer, none, rms, scale \(model.norm\)"):
        oracle.tiny(norm="hlaf")
    with pytest.raises(VariantError, match=r"unknown option of norm 'half' 'eps'; known: shift"):
        oracle.tiny(norm={"name": "half", "eps": 1e-5})


def test_a_made_up_norm_in_a_copied_table_leaves_the_original_alone():
    table = {**NORMS, "half": HalfNorm}
    half = build("norm", table, {"name": "half", "shift": 2.0}, 3)
    assert torch.equal(half(torch.zeros(3)), torch.full((3,), 2.0))
    with pytest.raises(VariantError, match="unknown norm 'half'"):
        build("norm", NORMS, "half", 3)


def test_a_name_and_a_mapping_are_the_same():
    assert normalize("rms") == normalize({"name": "rms"}) == {"name": "rms"}


def test_normalizing_leaves_the_given_mapping_alone():
    spec = {"name": "rms", "eps": 1e-5}
    build("norm", NORMS, spec, 4)
    assert spec == {"name": "rms", "eps": 1e-5}


@pytest.mark.parametrize("spec", [{}, {"eps": 1e-5}, {"name": None}])
def test_a_spec_without_a_known_name_is_refused(spec):
    with pytest.raises(VariantError, match="known: dyt, layer"):
        check("norm", NORMS, spec)


def test_error_names_the_given_the_nearest_the_known_and_the_place():
    error = unknown("norm", "laeyr", NORMS, "study.yaml: trial.model.norm")
    assert str(error) == (
        "unknown norm 'laeyr', did you mean 'layer'?; known: dyt, layer, none, rms, scale "
        "(study.yaml: trial.model.norm)"
    )
    assert (
        str(unknown("option of norm 'none'", "eps", [])) == "unknown option of norm 'none' 'eps'; known: none"
    )


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, table in TABLES.items() for n in table])
def test_every_variant_has_defaults_and_says_what_it_is(kind, name):
    variant = TABLES[kind][name]
    assert all(option.default is not option.empty for option in options_of(variant).values())
    first = (variant.__doc__ or "").strip().splitlines()[0]
    assert len(first) > 10
    assert name == "none" or "arXiv" in variant.__doc__ or "arXiv" in (variant.__mro__[1].__doc__ or "")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_are_in_order(table):
    assert list(table) == sorted(table)


def test_every_config_field_carries_a_doc_line():
    import inspect

    source = inspect.getsource(ModelConfig)
    lines = [line.strip() for line in source.splitlines()]
    for field in dataclasses.fields(ModelConfig):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{field.name}:"))
        assert lines[at + 1].startswith('"""'), field.name


def test_no_variant_is_known_by_name_outside_its_table():
    """transformer.py and sublayers.py branch on no variant's name."""
    import inspect

    from models import transformer

    names = {name for table in TABLES.values() for name in table} - {"none", "layer", "pre", "scale"}
    for module in (transformer, sublayers):
        code = inspect.getsource(module)
        found = [name for name in names if f'== "{name}"' in code or f"'{name}'" in code]
        assert found == []

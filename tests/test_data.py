"""Batches depend on seed and step alone; a corpus is what its files say."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.data import IGNORED, Batches, DataError, Tokens, causal_pairs, load_corpus, masked_pairs

CONTEXT = 7


def batches(seed: int = 0, num_tokens: int = 400, batch_size: int = 4) -> Batches:
    """Batches of a corpus whose tokens are their own positions."""
    return Batches(np.arange(num_tokens), CONTEXT, batch_size, seed)


@given(
    seed=st.integers(0, 2**31),
    steps=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    size=st.integers(1, 9),
)
def test_a_batch_is_a_pure_function_of_seed_and_step(seed: int, steps: list[int], size: int) -> None:
    used = batches(seed, batch_size=size)
    in_some_order = [used(step) for step in steps]
    for step, batch in zip(steps, in_some_order, strict=True):
        assert batch.dtype == np.int64 and batch.shape == (size, CONTEXT + 1)
        np.testing.assert_array_equal(batch, batches(seed, batch_size=size)(step))


@given(seed=st.integers(0, 2**31), num_tokens=st.integers(2 * CONTEXT + 1, 300), size=st.integers(1, 9))
def test_each_window_is_read_once_an_epoch(seed: int, num_tokens: int, size: int) -> None:
    source = batches(seed, num_tokens, size)
    needed = 2 * source.num_windows
    rows = np.concatenate([source(step) for step in range(1, needed // size + 2)])[:needed]
    assert (np.diff(rows, axis=1) == 1).all()  # every window is a piece of the text
    offsets = []
    for epoch in (rows[: source.num_windows, 0], rows[source.num_windows :, 0]):
        offset = epoch.min()
        assert offset < CONTEXT
        np.testing.assert_array_equal(np.sort(epoch), offset + CONTEXT * np.arange(source.num_windows))
        offsets.append(offset)
    assert source.num_windows >= (num_tokens - 1) // CONTEXT - 1


def test_epochs_and_seeds_differ_in_order_and_offset() -> None:
    orders = {tuple(batches(seed)(1)[:, 0]) for seed in range(20)}
    offsets = {int(batches(seed)(1)[0, 0] % CONTEXT) for seed in range(50)}
    assert len(orders) == 20 and offsets == set(range(CONTEXT))
    one = batches(batch_size=1)
    epochs = {tuple(one(e * one.num_windows + i)[0, 0] for i in (1, 2, 3)) for e in range(5)}
    assert len(epochs) == 5


def test_the_context_does_not_depend_on_the_batch_size() -> None:
    """Step by step the same windows, in groups: what k micro-batches see, one batch sees."""
    small = np.concatenate([batches(batch_size=2)(step) for step in range(1, 9)])
    large = np.concatenate([batches(batch_size=8)(step) for step in range(1, 3)])
    np.testing.assert_array_equal(small, large)


def test_a_corpus_too_small_says_how_much_is_needed() -> None:
    with pytest.raises(DataError, match="corpus of 14 tokens is too small for windows of 7; at least 15 are"):
        batches(num_tokens=14)
    assert batches(num_tokens=15).num_windows == 1
    assert batches(num_tokens=15)(3).max() <= 14


def test_the_target_is_the_next_token() -> None:
    inputs, targets = causal_pairs(batches()(1))
    assert inputs.shape == targets.shape == (4, CONTEXT)
    np.testing.assert_array_equal(targets, inputs + 1)


@given(seed=st.integers(0, 2**31), step=st.integers(1, 10**6), fraction=st.floats(0.001, 0.999))
def test_only_hidden_positions_are_targets_and_every_sequence_has_one(
    seed: int, step: int, fraction: float
) -> None:
    window = batches()(1)
    inputs, targets = masked_pairs(window, fraction, 9999, seed, step)
    hidden = inputs == 9999
    np.testing.assert_array_equal(targets[hidden], window[:, :-1][hidden])
    assert (targets[~hidden] == IGNORED).all()
    np.testing.assert_array_equal(inputs[~hidden], window[:, :-1][~hidden])
    # a micro-batch may be a single sequence, and its loss must be a mean over something
    assert hidden.any(axis=1).all()
    again = masked_pairs(window, fraction, 9999, seed, step)
    np.testing.assert_array_equal(again, (inputs, targets))


def test_the_hidden_share_is_the_fraction_and_moves_with_every_step() -> None:
    window = np.zeros((64, 129), np.int64)
    masks = [masked_pairs(window, 0.15, 1, 0, step)[0] for step in range(1, 9)]
    assert np.mean(masks) == pytest.approx(0.15, abs=0.01)
    assert len({mask.tobytes() for mask in masks}) == 8
    other_seed = masked_pairs(window, 0.15, 1, 1, 1)[0]
    assert other_seed.tobytes() != masks[0].tobytes()


def test_the_standard_library_is_always_there_and_always_the_same() -> None:
    corpus = load_corpus("stdlib")
    identity = corpus.identity
    assert corpus.tokens.dtype == np.uint8 and corpus.vocab_size == 256
    assert identity["name"] == "stdlib" and identity["tokenizer"] == "bytes"
    assert identity["bytes"] == len(corpus.tokens) > 5_000_000 and identity["files"] > 400
    assert identity["sha256"] == hashlib.sha256(corpus.tokens.tobytes()).hexdigest()
    program = "from study.data import load_corpus; print(load_corpus('stdlib').identity['sha256'])"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == identity["sha256"]  # no compiled file, no order of a directory in it


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c/x/deep.txt", "b/skip.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = load_corpus({"name": "text", "path": str(tmp_path), "suffix": ".txt"})
    assert corpus.tokens.tobytes() == b"a.txt\nb/10.txt\nb/2.txt\nc/x/deep.txt"
    assert corpus.identity["files"] == 4 and corpus.identity["name"] == str(tmp_path)
    single = load_corpus({"name": "text", "path": str(tmp_path / "a.txt")})
    assert single.tokens.tobytes() == b"a.txt"


def test_a_file_of_tokens_is_mapped_and_not_read(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16) % 300
    tokens.tofile(tmp_path / "corpus.bin")
    corpus = load_corpus({"name": "tokens", "path": str(tmp_path / "corpus.bin")})
    assert isinstance(corpus.tokens, np.memmap) and corpus.vocab_size == 300
    np.testing.assert_array_equal(corpus.tokens, tokens)
    assert corpus.identity["sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
    wide = load_corpus(
        {"name": "tokens", "path": str(tmp_path / "corpus.bin"), "dtype": "uint32", "vocab_size": 2**31}
    )
    assert len(wide.tokens) == 500 and wide.vocab_size == 2**31
    batch = Batches(corpus.tokens, 16, 2, 0)(1)
    assert batch.dtype == np.int64 and batch.max() < 300


def test_a_corpus_that_cannot_be_read_says_which(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.bin").touch()
    for spec, says in [
        ({"name": "text", "path": missing}, f"no corpus at '{missing}': neither a file nor a folder"),
        ({"name": "text", "path": str(tmp_path / "empty")}, "no corpus at"),
        ({"name": "tokens", "path": missing}, f"token file '{missing}' can't be read"),
        ({"name": "tokens", "path": str(tmp_path / "empty.bin")}, "can't be read"),
        ({"name": "text", "path": __file__, "tokenizer": missing}, "tokenizer"),
    ]:
        with pytest.raises(DataError, match=says):
            load_corpus(spec)
    with pytest.raises(ValueError, match="unknown dtype 'float32' of a token file; known: uint16, uint32"):
        load_corpus({"name": "tokens", "path": missing, "dtype": "float32"})


def test_tokens_of_one_corpus_are_shared_and_not_copied() -> None:
    corpus = Tokens(np.arange(400), 400, {})
    assert Batches(corpus.tokens, CONTEXT, 4, 0).tokens is corpus.tokens

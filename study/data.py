"""Corpora, and batches that depend on seed and step alone.

A corpus is one long array of tokens with an identity (what, how much, hash) that goes into the run's
record. Text is read as bytes unless a tokenizer is named. The default is the source of Python's own
standard library, read from the running interpreter: real text, always there, no download.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from models.imports import call, is_import
from models.variants import Spec, VariantError, build
from study.huggingface import HuggingFace
from study.tokenizing import encode_up_to, open_tokenizer
from study.tokens import DataError, Tokens, cached, hash_of

IGNORED = -100  # the target at positions whose loss is not asked for
BATCH_LINES = 10_000  # tokenized at once
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


class Stdlib:
    """The .py files of the running interpreter's standard library, tests left out: about 11 MB of bytes."""

    def load(self) -> Tokens:
        return _read_text(Path(sysconfig.get_paths()["stdlib"]), "stdlib", ".py", None)


class Text:
    """A text file, or every file in a folder in the order of their paths.

    `tokenizer`: a file or folder of the `tokenizers` library or a hub name; None: bytes.
    """

    def __init__(self, *, path: str, suffix: str = "", tokenizer: str | None = None) -> None:
        self.path, self.suffix, self.tokenizer = Path(path).expanduser(), suffix, tokenizer

    def load(self) -> Tokens:
        return _read_text(self.path, str(self.path), self.suffix, self.tokenizer)


class TokenFile:
    """A file of raw unsigned integers (`dtype` uint16 or uint32), memory-mapped, never read whole."""

    def __init__(self, *, path: str, dtype: str = "uint16", vocab_size: int | None = None) -> None:
        if dtype not in ("uint16", "uint32"):
            raise ValueError(f"unknown dtype '{dtype}' of a token file; known: uint16, uint32")
        self.path, self.dtype, self.vocab_size = Path(path).expanduser(), np.dtype(dtype), vocab_size

    def load(self) -> Tokens:
        try:
            tokens = np.memmap(self.path, dtype=self.dtype, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"token file '{self.path}' can't be read: {error}") from error
        vocab_size = self.vocab_size or int(tokens.max()) + 1
        identity = {"name": str(self.path), "tokens": len(tokens), "sha256": hash_of(tokens)}
        return Tokens(tokens, vocab_size, identity)


def _read_text(root: Path, name: str, suffix: str, tokenizer: str | None) -> Tokens:
    files = [root] if root.is_file() else _files(root, suffix)
    if not files:
        raise DataError(f"no corpus at '{root}': neither a file nor a folder with files")
    try:
        content = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise DataError(f"corpus '{root}' can't be read: {error}") from error
    content_hash = hashlib.sha256(content).hexdigest()
    identity = {"name": name, "files": len(files), "bytes": len(content), "sha256": content_hash}
    if tokenizer is None:
        return Tokens(np.frombuffer(content, np.uint8), 256, identity | {"tokenizer": "bytes"})
    opened = open_tokenizer(tokenizer)

    def encode() -> np.ndarray:
        lines = content.decode("utf-8", errors="replace").splitlines(keepends=True)
        batches = (lines[start : start + BATCH_LINES] for start in range(0, len(lines), BATCH_LINES))
        return encode_up_to(opened, batches, None)

    tokens = cached({"text": content_hash, "tokenizer": opened.sha256}, encode)
    identity |= {"sha256": hash_of(tokens), "tokens": len(tokens)}
    return Tokens(
        tokens, opened.vocab_size, identity | {"tokenizer": tokenizer, "tokenizer_sha256": opened.sha256}
    )


def _files(root: Path, suffix: str) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in STDLIB_LEFT_OUT)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(suffix)]
    return found


class Batches:
    """Batch `step` (from 1) of a corpus: a pure function of seed and step.

    The corpus is cut into windows of `context_length` tokens, from an offset that each epoch draws
    anew, and each epoch reads every window once, in an order of its own.
    """

    def __init__(self, tokens: np.ndarray, context_length: int, batch_size: int, seed: int) -> None:
        self.tokens, self.context_length, self.batch_size, self.seed = (
            tokens,
            context_length,
            batch_size,
            seed,
        )
        # One window is given up for the offset, one token for the target of the last position.
        self.num_windows = (len(tokens) - 1) // context_length - 1
        if self.num_windows < 1:
            raise DataError(
                f"a corpus of {len(tokens)} tokens is too small for windows of {context_length}; "
                f"at least {2 * context_length + 1} are needed"
            )
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            offset = int(random.integers(self.context_length))
            self._epoch = (epoch, offset, random.permutation(self.num_windows))
        return self._epoch[1], self._epoch[2]

    def __call__(self, step: int) -> np.ndarray:
        """Tokens of a step: int64 (batch_size, context_length + 1)."""
        starts = np.empty(self.batch_size, np.int64)
        for row in range(self.batch_size):
            epoch, window = divmod((step - 1) * self.batch_size + row, self.num_windows)
            offset, order = self._order(epoch)
            starts[row] = offset + order[window] * self.context_length
        return self.tokens[starts[:, None] + np.arange(self.context_length + 1)].astype(np.int64)


def causal_pairs(window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of next-token prediction from (batch, context_length + 1) tokens."""
    return window[:, :-1], window[:, 1:]


def masked_pairs(
    window: np.ndarray, fraction: float, mask_token: int, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of masked prediction: `fraction` of the positions hidden, only they are targets.

    At least one position of every sequence is hidden, so that no micro-batch's loss is a mean over
    nothing.
    """
    inputs = window[:, :-1].copy()
    random = np.random.default_rng([seed, step, 1])
    hidden = random.random(inputs.shape) < fraction
    bare = np.flatnonzero(~hidden.any(axis=1))
    hidden[bare, random.integers(inputs.shape[1], size=len(bare))] = True
    targets = np.where(hidden, inputs, IGNORED)
    inputs[hidden] = mask_token
    return inputs, targets


CORPORA = {
    "stdlib": Stdlib,
    "text": Text,
    "tokens": TokenFile,
    "huggingface": HuggingFace,
}


def load_corpus(spec: Spec) -> Tokens:
    """The corpus that a trial's `data` names or imports; DataError if it can't be read."""
    if is_import(spec):
        return _imported(spec)
    corpus: Tokens = build("data", CORPORA, spec, where="trial.data").load()
    return corpus


def _imported(spec: Any) -> Tokens:
    """What a callable gives: Tokens, or (1-D array of integers, size of the vocabulary)."""
    name = spec["import"]
    try:
        made = call("data", spec, where="trial.data")
    except VariantError as error:
        raise DataError(str(error)) from error
    given = (made.tokens, made.vocab_size) if isinstance(made, Tokens) else made
    if not isinstance(given, tuple) or len(given) != 2:
        raise DataError(f"data '{name}' gave {type(made).__name__}; must be Tokens or (tokens, vocab_size)")
    tokens, vocab_size = np.asarray(given[0]), int(given[1])
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise DataError(
            f"data '{name}' gave tokens of type {tokens.dtype} and shape {tokens.shape}; "
            "must be a 1-D array of integers"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(
            f"data '{name}' gave tokens from {tokens.min()} to {tokens.max()}; "
            f"must be from 0 to {vocab_size - 1}, below its vocab_size"
        )
    told = made.identity if isinstance(made, Tokens) else {}
    return Tokens(
        tokens, vocab_size, {"name": name, **told, "tokens": len(tokens), "sha256": hash_of(tokens)}
    )

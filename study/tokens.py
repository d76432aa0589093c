"""What a corpus becomes: tokens with an identity; and a cache of those that took long to make.

The cache lies in GRADNORM_CACHE, else in gradnorm-study below XDG_CACHE_HOME or ~/.cache: a `.npy` file for
each corpus, named by the hash of all that its tokens depend on, and memory-mapped by whoever trains on it.
A cache that can't be written is done without.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1  # of what is cached: another number makes all of it anew


class DataError(ValueError):
    """A corpus that can't be read or is too small; says which and why."""


@dataclass(frozen=True)
class Tokens:
    """A corpus ready for use: 1-D integer tokens, the size of their vocabulary, what they are."""

    tokens: np.ndarray
    vocab_size: int
    identity: dict[str, Any]


def hash_of(tokens: np.ndarray) -> str:
    """sha256 of the tokens' bytes."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), 1 << 22):
        digest.update(tokens[start : start + (1 << 22)].tobytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where tokens are kept."""
    own = os.environ.get("GRADNORM_CACHE")
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or Path(above, "gradnorm-study")).expanduser()


def cached(depends_on: dict[str, Any] | None, make: Callable[[], np.ndarray]) -> np.ndarray:
    """make()'s 1-D array, kept under all that it depends on; None: it is not known, and not kept."""
    if depends_on is None:
        return make()
    key = hashlib.sha256(json.dumps([FORMAT, depends_on], sort_keys=True).encode()).hexdigest()
    path = cache_folder() / f"{key}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        pass  # not there, or no whole file
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Many workers may make the same one at once: each writes its own file, and one name is left.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.save(file, made)
        os.replace(file.name, path)
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return made

"""Tokenizers of the `tokenizers` library, from a file, a folder or the Hugging Face hub."""

import hashlib
import logging
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from models.variants import one_line
from study.tokens import DataError

EXTRA = "needs the `data` extra: pip install '.[data]'"
PROBE_SECONDS = 3.0


class Bytes:
    """Text as its UTF-8 bytes: 256 tokens, nothing to learn or to load."""

    name, sha256, vocab_size, dtype = "bytes", None, 256, np.dtype(np.uint8)

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        for text in texts:
            yield np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)


class FileTokenizer:
    """A `tokenizer.json`, which is what the `tokenizers` library writes. No special tokens are added."""

    def __init__(self, name: str, file: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DataError(f"tokenizer '{name}' {EXTRA}") from error
        try:
            self.sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"tokenizer '{name}' can't be read: {one_line(error)}") from error
        self.name = name
        # Ids may have holes, so their count is not enough.
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=0) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.array(encoding.ids, self.dtype)


def open_tokenizer(name: str | None) -> Bytes | FileTokenizer:
    """The tokenizer at a file, in a folder (`tokenizer.json`), of a hub name; None: bytes."""
    if name is None:
        return Bytes()
    path = Path(name).expanduser()
    if path.is_file():
        return FileTokenizer(name, path)
    if path.is_dir():
        return FileTokenizer(name, path / "tokenizer.json")
    try:
        go_offline_where_there_is_no_hub()
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise DataError(f"tokenizer '{name}' {EXTRA}") from error
    try:
        return FileTokenizer(name, Path(hf_hub_download(name, "tokenizer.json")))
    except DataError:
        raise
    except Exception as error:  # no hub, no such name, no such file
        raise DataError(
            f"tokenizer '{name}' is no file or folder, and the hub gives none: {one_line(error)}"
        ) from error


def encode_up_to(
    tokenizer: Bytes | FileTokenizer, batches: Iterable[list[str]], max_tokens: int | None
) -> np.ndarray:
    """The tokens of all texts, one after the other; no batch is asked for once there are `max_tokens`."""
    parts = [np.empty(0, tokenizer.dtype)]
    missing = math.inf if max_tokens is None else max_tokens
    for texts in batches:
        parts.append(np.concatenate([parts[0], *tokenizer.encode(texts)]))
        missing -= len(parts[-1])
        if missing <= 0:
            break
    return np.concatenate(parts)[:max_tokens]


def go_offline_where_there_is_no_hub() -> None:
    """Let the hub's libraries use what they have cached, where they would try for half a minute in vain.

    Raises ImportError where they are not installed.
    """
    from huggingface_hub import constants

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # what fails is told in one line
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in proxies):
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (443 if hub.scheme == "https" else 80)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=PROBE_SECONDS).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for `datasets`, which reads it when it is imported
        for name in ("huggingface_hub.constants", "datasets.config"):
            if name in sys.modules:
                setattr(sys.modules[name], "HF_HUB_OFFLINE", True)  # noqa: B010 (a module has no such field)

"""Data sets of Hugging Face's `datasets` library, local or from the hub, as one long array of tokens."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.variants import VariantError, one_line, unknown
from study.tokenizing import EXTRA, encode_up_to, go_offline_where_there_is_no_hub, open_tokenizer
from study.tokens import DataError, Tokens, cached, hash_of

# Suffix of a single file -> the builder that reads it, with its settings.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {}),
}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
BATCH_ROWS = 256
COMMIT_LENGTH = 40


class HuggingFace:
    """A column of a data set of Hugging Face's `datasets`: a file, a folder, what save_to_disk left, or a hub name.

    Rows are joined by a line's end. `split` as the library has it (`train[:10%]`); `tokenizer`: a file or
    folder of the `tokenizers` library or a hub name, None: bytes. `streaming` reads rows until there are
    `max_tokens` and no more; without it `max_tokens` only cuts. Tokens are cached by the data set's own
    fingerprint; a stream's only where `revision` is a commit.
    """

    def __init__(
        self,
        *,
        path: str,
        config: str | None = None,
        split: str = "train",
        column: str = "text",
        revision: str | None = None,
        streaming: bool = False,
        tokenizer: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens {max_tokens}; must be at least 1")
        if streaming and max_tokens is None:
            raise ValueError("streaming needs max_tokens, where it ends")
        self.path, self.config, self.split, self.column = path, config, split, column
        self.revision, self.streaming, self.max_tokens = revision, streaming, max_tokens
        self.tokenizer = tokenizer

    def load(self) -> Tokens:
        tokenizer = open_tokenizer(self.tokenizer)
        rows = self._open()
        known = self._fingerprint(rows)
        depends_on = {
            "data": known,
            "column": self.column,
            "tokenizer": tokenizer.sha256,
            "max_tokens": self.max_tokens,
        }
        try:
            tokens = cached(
                depends_on if known is not None else None,
                lambda: encode_up_to(tokenizer, self._texts(rows), self.max_tokens),
            )
        except (DataError, VariantError):
            raise
        except Exception as error:  # a connection that is lost on the way, a file that breaks off
            raise DataError(f"data set '{self.path}' can't be read: {_reason(error)} (trial.data)") from error
        identity = {
            "name": self.path,
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "revision": self.revision,
            "tokens": len(tokens),
            "sha256": hash_of(tokens),
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.sha256,
        }
        return Tokens(tokens, tokenizer.vocab_size, identity)

    def _open(self) -> Any:
        """The library's own data set, map-style or iterable, with its one column."""
        local = Path(self.path).expanduser()
        try:
            if not local.exists():
                go_offline_where_there_is_no_hub()
            import datasets
        except ImportError as error:
            raise DataError(f"data 'huggingface' {EXTRA} (trial.data)") from error
        datasets.disable_progress_bars()
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what fails is told in one line
        try:
            rows = self._load(datasets, local)
            names = rows.column_names or list(next(iter(rows), {}))
        except (DataError, VariantError):
            raise
        except Exception as error:  # each builder raises its own
            place = "can't be read" if local.exists() else "is no file or folder, and the hub gives none"
            raise DataError(
                f"data set '{self.path}', split '{self.split}', {place}: {_reason(error)} (trial.data)"
            ) from error
        if self.column not in names:
            lacking = unknown(f"column of data set '{self.path}'", self.column, names, "trial.data: column")
            raise DataError(str(lacking))
        return rows.select_columns([self.column])

    def _load(self, datasets: Any, local: Path) -> Any:
        if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
            return self._saved(datasets, local)
        settings: dict[str, Any] = {"split": self.split, "streaming": self.streaming}
        if local.is_file():
            kinds = [suffix for suffix in local.suffixes if suffix not in COMPRESSED]
            kind = kinds[-1] if kinds else ""
            if kind not in READERS:
                raise DataError(str(unknown("kind of data file", local.name, READERS, "trial.data: path")))
            reader, more = READERS[kind]
            return datasets.load_dataset(reader, data_files=str(local), **more, **settings)
        path = str(local) if local.exists() else self.path
        return datasets.load_dataset(path, self.config, revision=self.revision, **settings)

    def _saved(self, datasets: Any, local: Path) -> Any:
        """What save_to_disk left: one data set, or several by split."""
        rows = datasets.load_from_disk(str(local))
        if isinstance(rows, datasets.DatasetDict):
            if self.split not in rows:
                known = unknown(f"split of data set '{self.path}'", self.split, rows, "trial.data: split")
                raise DataError(str(known))
            rows = rows[self.split]
        return rows.to_iterable_dataset() if self.streaming else rows

    def _fingerprint(self, rows: Any) -> Any:
        """What the rows depend on, or None where that can't be known."""
        own = getattr(rows, "_fingerprint", None)
        if own is not None and not self.streaming:
            return own
        if self.revision is not None and len(self.revision) == COMMIT_LENGTH:
            return [self.path, self.config, self.split, self.revision]
        return None

    def _texts(self, rows: Any) -> Iterator[list[str]]:
        for batch in rows.iter(batch_size=BATCH_ROWS):
            values = [value for value in batch[self.column] if value is not None]
            for value in values:
                if not isinstance(value, str):
                    shown = json.dumps(value, default=str)[:40]
                    raise DataError(
                        f"column '{self.column}' of data set '{self.path}' holds {type(value).__name__} "
                        f"{shown}; must hold text (trial.data: column)"
                    )
            yield [f"{value}\n" for value in values]


def _reason(error: BaseException) -> str:
    """The first cause that an error names, with its own text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error) if isinstance(error, Exception) else str(error)

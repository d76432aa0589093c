"""Data sets and tokenizers of Hugging Face's libraries: the tokens are those of the rows, or one line says why not."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from driving import ROOT, assert_exact, catalogue_of, run
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from study.config import ConfigError, trial_config
from study.data import DataError, Tokens, load_corpus
from study.tokenizing import Bytes, encode_up_to, open_tokenizer
from study.tokens import cached
from study.train import train

ROWS = [
    'He said "no", then left.',
    "naïve café 漢字 🙂",
    "",
    "tab\there; comma, semicolon",
    *map(str, range(200)),
]
TEXT = "".join(f"{row}\n" for row in ROWS)


@pytest.fixture(autouse=True)
def _caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADNORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))  # of processes that are started


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens that would put one of its own before each text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(ROWS, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def decoded(corpus: Tokens, file: Path) -> str:
    """The text that tokens stand for."""
    opened = Tokenizer.from_file(str(file))
    words = {number: word for word, number in opened.get_vocab().items()}
    to_byte = {letter: number for number, letter in enumerate_bytes()}
    return bytes(to_byte[letter] for token in corpus.tokens for letter in words[int(token)]).decode()


def enumerate_bytes() -> Iterator[tuple[int, str]]:
    """Byte and its letter in a byte-level vocabulary: printable ones are their own, others follow 256."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    yield from ((byte, chr(byte)) for byte in own)
    yield from ((byte, chr(256 + number)) for number, byte in enumerate(others))


def write(folder: Path, kind: str) -> Path:
    """The rows as a file or folder of a kind that the library knows."""
    rows = datasets.Dataset.from_dict({"text": ROWS, "number": list(range(len(ROWS)))})
    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    match kind:
        case "jsonl" | "json":
            path.write_text(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "csv" | "tsv":
            rows.to_csv(path, sep="," if kind == "csv" else "\t")
        case "parquet":
            rows.to_parquet(path)
        case "txt":
            path.write_text(TEXT)
        case "saved":
            rows.save_to_disk(path)
        case "splits":
            datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(path)
        case "arrow":
            rows.save_to_disk(folder / "parts")
            (path,) = (folder / "parts").glob("*.arrow")
        case "folder":
            path.mkdir()
            (path / "train.jsonl").write_text(lines)
    return path


KINDS = ["jsonl", "json", "jsonl.gz", "csv", "tsv", "parquet", "txt", "saved", "splits", "arrow", "folder"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_set_gives_the_bytes_of_its_rows(
    tmp_path: Path, kind: str, streaming: bool
) -> None:
    spec = {"name": "huggingface", "path": str(write(tmp_path, kind)), "streaming": streaming}
    corpus = load_corpus(spec | {"max_tokens": 10**6})
    # a table of values has no word for an empty one, and a row without text gives none
    expected = TEXT.replace("\n\n", "\n") if kind in ("csv", "tsv") else TEXT
    assert corpus.tokens.tobytes().decode() == expected
    assert (corpus.vocab_size, corpus.tokens.dtype) == (256, np.uint8)
    assert corpus.identity["sha256"] == hashlib.sha256(expected.encode()).hexdigest()
    assert corpus.identity["name"] == spec["path"] and corpus.identity["split"] == "train"
    cut = load_corpus(spec | {"max_tokens": 100})
    assert cut.tokens.tobytes() == expected.encode()[:100]


def test_a_tokenizer_by_file_and_by_folder_gives_the_text_back_for_text_and_data_sets(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "rows.txt").write_text(TEXT)
    path = str(tmp_path / "rows.txt")
    specs = [
        {"name": name, "path": path, "tokenizer": str(where)}
        for name in ("text", "huggingface")
        for where in (tokenizer, tokenizer.parent)
    ]
    corpora = [load_corpus(spec) for spec in specs]
    for spec, corpus in zip(specs, corpora, strict=True):
        assert decoded(corpus, tokenizer) == TEXT  # with no token of its own before a row
        assert corpus.vocab_size == 300 and corpus.tokens.dtype == np.uint16
        assert len(corpus.tokens) < len(TEXT.encode()) and corpus.identity["tokens"] == len(corpus.tokens)
        assert corpus.identity["tokenizer"] == spec["tokenizer"]
        assert corpus.identity["tokenizer_sha256"] == hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        assert corpus.identity["sha256"] == hashlib.sha256(corpus.tokens.tobytes()).hexdigest()


def test_ids_with_holes_are_below_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "?": 5}, unk_token="?")).save(str(tmp_path / "t.json"))
    opened = open_tokenizer(str(tmp_path / "t.json"))
    assert (opened.vocab_size, opened.dtype) == (70_001, np.uint32)
    assert encode_up_to(opened, [["b", "a"]], None).tolist() == [70_000, 0]


@given(st.lists(st.lists(st.text(), max_size=4), max_size=6), st.integers(1, 30))
def test_no_batch_is_read_beyond_the_last_token_that_is_asked_for(
    batches: list[list[str]], max_tokens: int
) -> None:
    whole = "".join(text for batch in batches for text in batch).encode(errors="replace")
    asked: list[list[str]] = []

    def read() -> Iterator[list[str]]:
        for batch in batches:
            asked.append(batch)
            yield batch

    assert encode_up_to(Bytes(), read(), max_tokens).tobytes() == whole[:max_tokens]
    before = "".join(text for batch in asked[:-1] for text in batch).encode(errors="replace")
    assert len(before) < max_tokens
    assert encode_up_to(Bytes(), batches, None).tobytes() == whole


def test_a_trial_trains_on_a_data_set(tmp_path: Path, tokenizer: Path, shrink: Any) -> None:
    data = {"name": "huggingface", "path": str(write(tmp_path, "jsonl")), "tokenizer": str(tokenizer)}
    config = shrink({"data": data}, steps=60)  # several epochs
    *_, last = train(config, load_corpus(config.data))
    assert last.status == "finished"
    assert config.model_dump()["data"] == data | {
        "config": None, "split": "train", "column": "text", "revision": None, "streaming": False,
        "max_tokens": None,
    }  # fmt: skip


def test_tokens_are_cached_and_mapped_and_other_processes_find_them(tmp_path: Path, tokenizer: Path) -> None:
    spec = {"name": "huggingface", "path": str(write(tmp_path, "jsonl")), "tokenizer": str(tokenizer)}
    first = load_corpus(spec)
    (file,) = (tmp_path / "cache").iterdir()
    assert isinstance(first.tokens, np.memmap)
    stamp = file.stat().st_mtime_ns
    program = f"from study.data import load_corpus; print(load_corpus({spec!r}).identity['sha256'])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == first.identity["sha256"], done.stderr
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()] == [stamp]
    load_corpus(spec | {"tokenizer": None})
    load_corpus(spec | {"max_tokens": 5})
    load_corpus({"name": "text", "path": spec["path"], "tokenizer": str(tokenizer)})
    assert len(list((tmp_path / "cache").iterdir())) == 4
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_cache_that_is_torn_or_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> np.ndarray:
        return np.arange(1000, dtype=np.uint16)

    for _ in range(2):
        np.testing.assert_array_equal(cached({"a": 1}, make), make())
    (file,) = (tmp_path / "cache").iterdir()
    for content in (b"", file.read_bytes()[:300], b"nothing of the kind"):
        file.write_bytes(content)
        np.testing.assert_array_equal(cached({"a": 1}, make), make())
        assert len(file.read_bytes()) > 2000
    (tmp_path / "taken").touch()
    monkeypatch.setenv("GRADNORM_CACHE", str(tmp_path / "taken"))
    np.testing.assert_array_equal(cached({"a": 1}, make), make())


def test_a_stream_is_cached_only_where_its_revision_is_a_commit(tmp_path: Path) -> None:
    spec = {"name": "huggingface", "path": str(write(tmp_path, "jsonl")), "streaming": True, "max_tokens": 50}
    load_corpus(spec)
    assert not (tmp_path / "cache").exists()
    load_corpus(spec | {"revision": "0" * 40})
    assert len(list((tmp_path / "cache").iterdir())) == 1


REFUSED = [
    (
        {"column": "txt"},
        "unknown column of data set 'ROWS' 'txt', did you mean 'text'?; known: number, text (trial",
    ),
    (
        {"column": "number"},
        "column 'number' of data set 'ROWS' holds int 0; must hold text (trial.data: column)",
    ),
    (
        {"split": "test"},
        "data set 'ROWS', split 'test', can't be read: ValueError: ",
    ),
    (
        {"path": "SPLITS", "split": "tset"},
        "unknown split of data set 'SPLITS' 'tset', did you mean 'test'?; known: te",
    ),
    ({"path": "BROKEN"}, "data set 'BROKEN', split 'train', can't be read: "),
    (
        {"path": "STRANGE"},
        "unknown kind of data file 'rows.xyz'; known: .arrow, .csv, .json, .jsonl, .parquet, .ts",
    ),
    ({"path": "EMPTY"}, "data set 'EMPTY', split 'train', can't be read: "),
    (
        {"path": "nobody/nothing"},
        "data set 'nobody/nothing', split 'train', is no file or folder, and the hub gives ",
    ),
    (
        {"tokenizer": "nobody/nothing"},
        "tokenizer 'nobody/nothing' is no file or folder, and the hub gives none: ",
    ),
    ({"tokenizer": "ROWS"}, "tokenizer 'ROWS' can't be read: "),
    ({"tokenizer": "EMPTY"}, "tokenizer 'EMPTY' can't be read: FileNotFoundError: "),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("settings", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_data_set_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str, streaming: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    paths = {"ROWS": write(tmp_path, "jsonl"), "SPLITS": write(tmp_path, "splits")}
    for name, file in (("BROKEN", "broken.jsonl"), ("STRANGE", "rows.xyz")):
        paths[name] = tmp_path / file
        paths[name].write_text("{ no json")
    paths["EMPTY"] = tmp_path / "empty"
    paths["EMPTY"].mkdir()
    spec: dict[str, Any] = {"name": "huggingface", "path": "ROWS", "streaming": streaming, "max_tokens": 10}
    spec = {key: str(paths.get(value, value)) if isinstance(value, str) else value
            for key, value in (spec | settings).items()}  # fmt: skip
    with pytest.raises(DataError) as caught:
        load_corpus(spec)
    for name, path in paths.items():
        says = says.replace(f"'{name}'", f"'{path}'")
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"streaming": True}, "streaming needs max_tokens, where it ends"),
        ({"max_tokens": 0}, "max_tokens 0; must be at least 1"),
        ({"max_tokens": "many"}, "data max_tokens: "),
        ({"colunm": "text"}, "unknown option of data 'huggingface' 'colunm', did you mean 'column'?"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_read(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trial_config({"data": {"name": "huggingface", "path": "nobody/nothing"} | settings}, {}, "study.yaml")
    assert str(caught.value).startswith(says) and str(caught.value).endswith("(study.yaml: data)")


@pytest.mark.parametrize("library", ["datasets", "tokenizers", "huggingface_hub"])
def test_a_missing_extra_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    spec = {"name": "huggingface", "path": str(write(tmp_path, "jsonl"))}
    monkeypatch.setitem(sys.modules, library, None)
    spec |= {"tokenizer": str(tokenizer)} if library == "tokenizers" else {}
    spec |= {"path": "nobody/nothing"} if library == "huggingface_hub" else {}
    with pytest.raises(DataError, match=r"needs the `data` extra: pip install '.\[data\]'"):
        load_corpus(spec)


HUB_AWAY = [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
TIMED = """
import sys, time
import datasets
from study.data import DataError, load_corpus
began = time.monotonic()
try:
    load_corpus({"name": "huggingface", "path": sys.argv[1]} | ({"tokenizer": sys.argv[2]} if sys.argv[2:] else {}))
except DataError as error:
    print(error, time.monotonic() - began, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("environment", HUB_AWAY, ids=str)
def test_an_unreachable_hub_is_told_in_one_line_and_soon(tmp_path: Path, environment: dict[str, str]) -> None:
    """The hub's own library would try for 23 s, telling so in a line each time."""
    (tmp_path / "rows.txt").write_text(TEXT)
    without = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    for arguments in (["nobody/nothing"], [str(tmp_path / "rows.txt"), "nobody/nothing"]):
        done = subprocess.run(
            [sys.executable, "-c", TIMED, *arguments],
            cwd=ROOT, capture_output=True, text=True, env={**os.environ, **without, **environment},
        )  # fmt: skip
        message, seconds = done.stdout.splitlines()
        assert "'nobody/nothing'" in message and "the hub gives none: " in message
        assert not done.stderr and float(seconds) < 10


@pytest.mark.slow
def test_an_unreachable_hub_ends_the_command_in_one_line() -> None:
    data = "trial.data={name: huggingface, path: nobody/nothing}"
    status, output = run("figure", "--dry-run", "--set", data, **HUB_AWAY[1])
    assert (status, len(output.strip().splitlines())) == (2, 1), output
    assert output.startswith("error: ") and "nobody/nothing" in output and "the hub gives none" in output


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_on_a_tokenized_data_set_tokenizes_once_and_says_nothing_of_it(
    tmp_path: Path, tokenizer: Path
) -> None:
    """The driver tokenizes, its workers map what it kept."""
    study = tmp_path / "own.yaml"
    data = f"{{name: huggingface, path: {write(tmp_path, 'parquet')}, tokenizer: {tokenizer}}}"
    study.write_text(
        f"trial: {{data: {data}, steps: 40, batch_size: 4, model: {{d_model: 16, num_layers: 2, context_length: 8}}}}\n"
        "arms: [{clip: none}, {clip: zclip}]\n"
    )
    status, output = run(study, "--storage", tmp_path / "runs", "--run-id", "tokens")
    assert status == 0 and "huggingface/tokenizers" not in output, output
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert_exact(tmp_path / "runs", "tokens")
    stored = catalogue_of(tmp_path / "runs").run("tokens")
    assert stored is not None and stored["data"][0]["tokenizer"] == str(tokenizer)

"""A trace is exactly the steps 1..N whatever was killed, merged or damaged on the way."""

import contextlib
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from study.storage import Storage
from study.traces import MAX_PARTS, TraceError, TraceWriter, list_part_names, read_trace, trace_folder

RUN, TRIAL = "run", "run_00000"
FOLDER = trace_folder(RUN, TRIAL)


def rows(first: int, last: int, **columns: Any) -> dict[str, Any]:
    """Rows of steps `first` to `last`, each value a pure function of its step."""
    steps = np.arange(first, last + 1)
    return {"step": steps, "loss": np.sin(steps), "grad_norm": np.cos(steps), **columns}


def write(storage: Storage, *cuts: int, after: int = 0) -> TraceWriter:
    """A writer that has appended parts that end at `cuts`."""
    writer = TraceWriter(storage, RUN, TRIAL, after=after)
    for cut in cuts:
        writer.append(rows(writer.last + 1, cut))
    return writer


def assert_whole(storage: Storage, last: int) -> None:
    trace = read_trace(storage, RUN, TRIAL)
    np.testing.assert_array_equal(trace.numpy("step"), np.arange(1, last + 1))
    np.testing.assert_array_equal(trace.numpy("loss"), np.sin(np.arange(1, last + 1)).astype(np.float32))


def test_the_format_is_the_one_that_others_read(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    writer = TraceWriter(storage, RUN, TRIAL)
    writer.append(rows(1, 3, skipped=np.array([False, True, False])))
    writer.append(rows(4, 5, skipped=np.array([False, False])))
    files = list_part_names(storage, RUN, TRIAL)
    assert files == ["000000001.parquet", "000000004.parquet"]
    assert all((tmp_path / "run" / "run_00000" / "trace" / name).is_file() for name in files)
    part = pq.ParquetFile(tmp_path / FOLDER / files[0])
    types = {field.name: str(field.type) for field in part.schema_arrow}
    assert types == {"step": "int32", "loss": "float", "grad_norm": "float", "skipped": "bool"}
    metadata = {key.decode(): value.decode() for key, value in part.schema_arrow.metadata.items()}
    assert metadata == {
        "gradnorm.format": "1", "gradnorm.run": RUN, "gradnorm.trial": TRIAL, "gradnorm.attempt": "1",
    }  # fmt: skip
    assert {part.metadata.row_group(0).column(i).compression for i in range(4)} == {"ZSTD"}


def test_nonfinite_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = np.array([math.nan, math.inf, -math.inf, -0.0, 3.4e38, 1e-45], np.float32)
    storage = Storage(tmp_path)
    writer = TraceWriter(storage, RUN, TRIAL)
    writer.append(rows(1, 6, grad_norm=values))
    writer.append(rows(7, 7))
    writer.close()
    read = read_trace(storage, RUN, TRIAL).numpy("grad_norm")[:6]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read.view(np.int32), values.view(np.int32))


def test_not_sampled_is_null_and_a_nan_is_not(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    writer = TraceWriter(storage, RUN, TRIAL)
    sampled = np.ma.masked_array([1.0, math.nan, 3.0], mask=[False, False, True])
    writer.append(rows(1, 3, val_loss=sampled))
    writer.append(rows(4, 4))
    writer.close()
    column = read_trace(storage, RUN, TRIAL).table.column("val_loss")
    assert column.is_null().to_pylist() == [False, False, True, True]
    assert math.isnan(column[1].as_py())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    first=st.integers(1, 60),
    length=st.integers(0, 60),
    closed=st.booleans(),
)
def test_any_range_of_any_parts_is_cut_from_the_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], first: int, length: int, closed: bool
) -> None:
    storage = Storage(tmp_path_factory.mktemp("trace"))
    writer = write(storage, *np.cumsum(lengths).tolist())
    if closed:
        writer.close()
        assert len(list_part_names(storage, RUN, TRIAL)) == 1
    last = first + length
    trace = read_trace(storage, RUN, TRIAL, ["loss"], first=first, last=last)
    steps = np.arange(first, min(last, sum(lengths)) + 1)
    np.testing.assert_array_equal(trace.numpy("step"), steps)
    np.testing.assert_array_equal(trace.numpy("loss"), np.sin(steps).astype(np.float32))
    assert trace.table.column_names == ["step", "loss"]


def test_parts_never_pile_up_and_each_row_is_rewritten_seldom(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    written = 0

    class Counting(Storage):
        def write(self, name: str, content: Any) -> None:
            nonlocal written
            if name.endswith(".parquet"):
                written += pq.ParquetFile(pa.BufferReader(content)).metadata.num_rows
            super().write(name, content)

    writer = TraceWriter(Counting(tmp_path), RUN, TRIAL)
    most = 0
    for cut in range(2, 2 * 400 + 1, 2):
        writer.append(rows(cut - 1, cut))
        most = max(most, len(list_part_names(storage, RUN, TRIAL)))
    assert most <= 100 and most <= MAX_PARTS
    assert written <= 800 * (1 + math.log2(400))
    assert_whole(storage, 800)
    writer.close()
    assert list_part_names(storage, RUN, TRIAL) == ["000000001.parquet"]
    assert_whole(storage, 800)


class Crash(Exception):
    """The machine goes down here."""


class Crashing(Storage):
    """A storage on which the process dies at its `at`-th change."""

    at, changes = 10**9, 0

    def _change(self) -> None:
        self.changes += 1
        if self.changes >= self.at:
            raise Crash

    def write(self, name: str, content: Any) -> None:
        self._change()
        super().write(name, content)

    def delete(self, name: str) -> None:
        self._change()
        super().delete(name)


@pytest.mark.parametrize("at", range(1, 6))
def test_a_crash_in_the_middle_of_a_merge_loses_and_doubles_nothing(tmp_path: Path, at: int) -> None:
    storage = Crashing(tmp_path)
    writer = write(storage, 10, 20, 35, 36, 50)
    storage.at, storage.changes = at, 0
    with pytest.raises(Crash):
        writer.close()
    storage.at = 10**9
    assert_whole(storage, 50)
    for first in range(1, 51):
        assert read_trace(storage, RUN, TRIAL, first=first).numpy("step").tolist() == list(range(first, 51))
    again = write(storage, 60, after=50)
    assert_whole(storage, 60)
    again.close()
    assert len(list_part_names(storage, RUN, TRIAL)) == 1
    assert_whole(storage, 60)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(lengths=[4, 4, 4], dies_at=6, resumes=5)  # dies between a merge and the deletion of its members
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    dies_at=st.integers(1, 20),
    resumes=st.integers(0, 80),
)
def test_a_resumed_trial_drops_what_came_after_its_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dies_at: int, resumes: int
) -> None:
    storage = Crashing(tmp_path_factory.mktemp("trace"))
    storage.at = dies_at
    with contextlib.suppress(Crash):
        write(storage, *np.cumsum(lengths).tolist()).close()
    storage.at = 10**9
    recorded = read_trace(storage, RUN, TRIAL).table.num_rows
    after = min(resumes, recorded)
    writer = TraceWriter(storage, RUN, TRIAL, after=after)
    assert writer.last == after and writer.attempt == (2 if recorded else 1)
    assert_whole(storage, after)
    writer.append(rows(after + 1, after + 7))
    writer.close()
    assert_whole(storage, after + 7)


def test_a_writer_refuses_gaps_and_repeats(tmp_path: Path) -> None:
    writer = write(Storage(tmp_path), 5)
    for first in (4, 5, 7):
        with pytest.raises(TraceError, match="don't follow step 5 one by one"):
            writer.append(rows(first, 9))
    with pytest.raises(TraceError, match="don't follow"):
        writer.append(rows(6, 8) | {"step": np.array([6, 8, 7])})
    writer.append({name: values[:0] for name, values in rows(6, 6).items()})
    assert_whole(writer.storage, 5)


def test_a_writer_says_so_if_steps_before_its_checkpoint_are_gone(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    write(storage, 10, 20, 30)
    with pytest.raises(TraceError, match="ends at step 30, not at step 31"):
        TraceWriter(storage, RUN, TRIAL, after=31)
    storage.delete(f"{FOLDER}/000000011.parquet")
    with pytest.raises(TraceError, match="steps after 10 are missing"):
        TraceWriter(storage, RUN, TRIAL, after=30)
    storage.write(f"{FOLDER}/000000001.parquet", b"PAR1 torn")
    with pytest.raises(TraceError, match="can't be read"):
        TraceWriter(storage, RUN, TRIAL, after=10)
    assert TraceWriter(storage, RUN, TRIAL).last == 0
    assert list_part_names(storage, RUN, TRIAL) == []


def test_the_newest_writer_owns_the_trace(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    given_up = write(storage, 10, 20)
    alive = TraceWriter(storage, RUN, TRIAL, after=10)
    for action in (lambda: given_up.append(rows(21, 30)), given_up.close):
        with pytest.raises(TraceError, match="another worker has taken over"):
            action()
    alive.append(rows(11, 15))
    assert_whole(storage, 15)
    alive.close()
    assert storage.names(FOLDER) == ["000000001.parquet"]


@pytest.mark.parametrize("damage", ["torn", "empty", "foreign"])
def test_reader_ignores_a_torn_part_and_says_so(tmp_path: Path, damage: str) -> None:
    storage = Storage(tmp_path)
    write(storage, 10, 20, 30)
    path = tmp_path / FOLDER / "000000011.parquet"
    content = path.read_bytes()
    path.write_bytes({"torn": content[: len(content) // 2], "empty": b"", "foreign": b"{}"}[damage])
    (tmp_path / FOLDER / "notes.txt").write_text("no part")
    (tmp_path / FOLDER / "000000031.parquet.1a2b3c4d.tmp").write_bytes(content)
    trace = read_trace(storage, RUN, TRIAL)
    assert trace.numpy("step").tolist() == [*range(1, 11), *range(21, 31)]
    assert len(trace.unreadable) == 1 and trace.unreadable[0].startswith("000000011.parquet: ")


def test_a_part_without_steps_is_no_part(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    write(storage, 10)
    pq.write_table(pa.table({"loss": [1.0]}), tmp_path / FOLDER / "000000011.parquet")
    trace = read_trace(storage, RUN, TRIAL)
    assert trace.table.num_rows == 10 and "no column 'step'" in trace.unreadable[0]


def test_an_absent_trace_is_an_empty_one(tmp_path: Path) -> None:
    trace = read_trace(Storage(tmp_path), RUN, TRIAL, ["grad_norm"])
    assert trace.table.num_rows == 0 and trace.table.column_names == ["step", "grad_norm"]
    assert trace.unreadable == [] and trace.names == ()


def test_columns_that_a_part_lacks_are_null_in_its_rows(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    writer = write(storage, 2)
    writer.append(rows(3, 4, attn_logit_max=np.array([5.0, 6.0])))
    trace = read_trace(storage, RUN, TRIAL, ["attn_logit_max", "val_loss"])
    np.testing.assert_array_equal(trace.numpy("attn_logit_max"), [math.nan, math.nan, 5.0, 6.0])
    assert np.isnan(trace.numpy("val_loss")).all() and len(trace.numpy("val_loss")) == 4
    assert trace.names == ("loss", "grad_norm", "attn_logit_max")


class MergedMeanwhile(Storage):
    """A storage whose writer merges all parts between a reader's first part and its second."""

    writer: TraceWriter | None = None
    opened = 0

    def path(self, name: str) -> str:
        if name.endswith(".parquet") and self.writer is not None:
            self.opened += 1
            if self.opened == 2:
                self.writer.close()
        return super().path(name)


@pytest.mark.parametrize("first", [1, 5, 15])
def test_a_merge_under_a_reader_hides_no_rows(tmp_path: Path, first: int) -> None:
    storage = MergedMeanwhile(tmp_path)
    storage.writer = write(Storage(tmp_path), 10, 20, 30, 40)
    trace = read_trace(storage, RUN, TRIAL, first=first)
    assert len(list_part_names(storage, RUN, TRIAL)) == 1  # it did merge
    assert trace.numpy("step").tolist() == list(range(first, 41)) and trace.unreadable == []


def test_a_reader_beside_a_busy_writer_sees_every_step_that_was_flushed(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    writer = write(storage, 1)
    failures, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            at_least = writer.last
            steps = read_trace(storage, RUN, TRIAL).numpy("step")
            if steps.tolist() != list(range(1, len(steps) + 1)) or len(steps) < at_least:
                failures.append((at_least, len(steps), steps[-1]))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(2, 401):
            writer.append(rows(step, step))
    finally:
        done.set()
        reader.join()
    assert failures == []

"""Traces: what every step of a trial left behind, as Parquet part files. No torch, no Ray.

A part is `<run>/<trial>/trace/<first step, 9 digits>.parquet`, written whole. Parts are merged as
they pile up, by writing the merged part over its first member and deleting the others after it;
between the two a crash leaves rows twice, which is why a reader takes from each part only the
steps after those that it has. NaN and inf are values like any other; null means "not sampled".

    writer = TraceWriter(Storage("runs"), "run", "run_00000")
    writer.append({"step": steps, "loss": losses, ...})
    writer.close()
    trace = read_trace(Storage("runs"), "run", "run_00000", columns=["step", "grad_norm"])
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from study.parts import (
    COLUMN_TYPES,
    FORMAT_VERSION,
    Part,
    encode,
    list_part_names,
    num_mergeable,
    part_table,
    read_part,
    trace_folder,
)
from study.storage import Storage

MAX_PARTS = 64


class TraceError(ValueError):
    """A trace is not what its writer left: steps are missing or a part can't be read."""


@dataclass(frozen=True)
class Trace:
    """Rows of a trial in the order of their steps, and the parts that could not be read.

    `names` are the columns that the parts hold, read or not, `step` left out.
    """

    table: pa.Table
    unreadable: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()

    def numpy(self, column: str) -> np.ndarray:
        """One column as an array; null (not sampled) becomes NaN, a column that is absent too."""
        if column not in self.table.column_names:
            return np.full(self.table.num_rows, np.nan, np.float32)
        return self.table.column(column).to_numpy()

    def columns(self) -> dict[str, np.ndarray]:
        """All columns as arrays."""
        return {name: self.numpy(name) for name in self.table.column_names}


def read_trace(
    storage: Storage,
    run_id: str,
    trial_id: str,
    columns: Sequence[str] | None = None,
    first: int = 1,
    last: int | None = None,
    listings: int = 5,
) -> Trace:
    """Steps `first` to `last` of a trial's trace (both included; None: to the end).

    `columns` limits what is read; `step` is always there. Columns that a part lacks are null in its
    rows. Parts that can't be read are named in `unreadable` and left out. `listings`: how often to
    begin anew, at most, because a writer has merged what a listing named.
    """
    folder = trace_folder(run_id, trial_id)
    tables: list[pa.Table] = []
    unreadable: list[str] = []
    present: dict[str, None] = {}
    seen = first - 1
    names = list_part_names(storage, run_id, trial_id)
    for index, name in enumerate(names):
        if last is not None and int(name[:9]) > last:
            break
        if index + 1 < len(names) and int(names[index + 1][:9]) <= first:
            continue  # the next part begins at or before what is asked for
        try:
            table = read_part(storage, f"{folder}/{name}", columns, present)
        except (pa.ArrowException, OSError, KeyError) as error:
            if isinstance(error, FileNotFoundError) and listings > 1:
                # Its rows are in a part that may have been read before they came there.
                return read_trace(storage, run_id, trial_id, columns, first, last, listings - 1)
            unreadable.append(f"{name}: {error}")
            continue
        steps = table.column("step").to_numpy()
        begin = int(np.searchsorted(steps, seen, side="right"))
        end = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
        if end > begin:
            tables.append(table.slice(begin, end - begin))
            seen = int(steps[end - 1])
    if not tables:
        return Trace(_empty(columns), unreadable, tuple(present))
    table = pa.concat_tables(tables, promote_options="default").combine_chunks()
    return Trace(table.replace_schema_metadata(None), unreadable, tuple(present))


def _empty(columns: Sequence[str] | None) -> pa.Table:
    names = dict.fromkeys(["step", *(columns if columns is not None else ["loss", "grad_norm"])])
    return pa.table({name: pa.array([], COLUMN_TYPES.get(name, pa.float32())) for name in names})


class TraceWriter:
    """Appends parts to one trial's trace; the only writer of it at any time.

    The newest writer owns the trace (it signs the file `owner` beside the parts): a worker that was
    given up for dead and still lives gets a TraceError at its next part.
    `after` is the step from which the trial goes on: rows recorded later than it are dropped (they
    will be recorded again, identically), and TraceError says so if steps up to it are missing.
    """

    def __init__(self, storage: Storage, run_id: str, trial_id: str, *, after: int = 0) -> None:
        self.storage = storage
        self.folder = trace_folder(run_id, trial_id)
        self.token = uuid.uuid4().hex.encode()
        storage.write(f"{self.folder}/owner", self.token)
        self.parts: list[Part] = []
        names = list_part_names(storage, run_id, trial_id)
        self.attempt = 1 + max((self._attempt_of(name) for name in names), default=0)
        self.metadata = {
            "gradnorm.format": str(FORMAT_VERSION),
            "gradnorm.run": run_id,
            "gradnorm.trial": trial_id,
            "gradnorm.attempt": str(self.attempt),
        }
        for name in names:
            self._adopt(name, after)
        if self.last != after:
            raise TraceError(f"trace of {trial_id} ends at step {self.last}, not at step {after}")

    @property
    def last(self) -> int:
        """The last step that is on the storage."""
        return self.parts[-1].last if self.parts else 0

    def _attempt_of(self, name: str) -> int:
        try:
            with self.storage.fs.open_input_file(self.storage.path(f"{self.folder}/{name}")) as source:
                return int((pq.read_schema(source).metadata or {}).get(b"gradnorm.attempt", 1))
        except (pa.ArrowException, OSError):
            return 1

    def _adopt(self, name: str, after: int) -> None:
        """Take over a part of an earlier attempt: whole, cut at `after`, or not at all."""
        path = f"{self.folder}/{name}"
        if self.last >= after or int(name[:9]) > after:
            return self.storage.delete(path)  # later than `after`, or merged into the part that was cut there
        try:
            steps = read_part(self.storage, path, ["step"]).column("step").to_numpy()
            last = int(steps[-1])
            contiguous = last - int(steps[0]) + 1 == len(steps)
        except (pa.ArrowException, OSError, IndexError) as error:
            raise TraceError(f"part {path} can't be read: {error}") from error
        if last <= self.last:
            return self.storage.delete(path)  # its rows were merged into the part before it
        if int(steps[0]) != self.last + 1 or not contiguous:
            raise TraceError(f"steps after {self.last} are missing before part {path}")
        if last > after:
            table = read_part(self.storage, path, None)
            self._write(name, table.slice(0, after - int(steps[0]) + 1))
        self.parts.append(Part(name, int(steps[0]), min(last, after)))
        return None

    def append(self, columns: Mapping[str, Any]) -> None:
        """Write one part. `columns` maps names to arrays of one length, `step` among them.

        Steps must follow the last written one without a gap. A masked array's masked places and a
        pyarrow array's nulls are stored as null.
        """
        table = part_table(columns)
        steps = table.column("step").to_numpy()
        if len(steps) == 0:
            return
        expected = np.arange(self.last + 1, self.last + 1 + len(steps))
        if not np.array_equal(steps, expected):
            raise TraceError(f"steps {steps[0]}..{steps[-1]} don't follow step {self.last} one by one")
        self._check_owner()
        part = Part(f"{int(steps[0]):09d}.parquet", int(steps[0]), int(steps[-1]))
        self._write(part.name, table)
        self.parts.append(part)
        if len(self.parts) >= MAX_PARTS:
            self._merge(num_mergeable(self.parts))

    def close(self) -> None:
        """Merge what there is into one part."""
        self._check_owner()
        self._merge(len(self.parts))
        self.storage.delete(f"{self.folder}/owner")

    def _check_owner(self) -> None:
        try:
            owner = self.storage.read(f"{self.folder}/owner").to_pybytes()
        except FileNotFoundError:
            owner = b""
        if owner != self.token:
            raise TraceError(f"another worker has taken over {self.folder}")

    def _merge(self, num_parts: int) -> None:
        """Merge the last `num_parts` parts: first the merged part appears, then its members go."""
        members = self.parts[len(self.parts) - num_parts :]
        if len(members) < 2:
            return
        tables = [read_part(self.storage, f"{self.folder}/{part.name}", None) for part in members]
        merged = Part(members[0].name, members[0].first, members[-1].last)
        self._write(merged.name, pa.concat_tables(tables, promote_options="default"))
        for part in members[1:]:
            self.storage.delete(f"{self.folder}/{part.name}")
        self.parts[len(self.parts) - num_parts :] = [merged]

    def _write(self, name: str, table: pa.Table) -> None:
        self.storage.write(f"{self.folder}/{name}", encode(table, self.metadata))

"""Part files: one stretch of a trace as Parquet, and how many of them are merged at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from study.storage import Storage

FORMAT_VERSION = 1

# Types of the columns that the contract names; every other column is float32.
COLUMN_TYPES = {"step": pa.int32(), "skipped": pa.bool_()}


@dataclass(frozen=True)
class Part:
    """One readable part: its file name and the steps that it holds."""

    name: str
    first: int
    last: int

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1


def trace_folder(run_id: str, trial_id: str) -> str:
    """Where a trial's parts lie, relative to the storage root."""
    return f"{run_id}/{trial_id}/trace"


def list_part_names(storage: Storage, run_id: str, trial_id: str) -> list[str]:
    """Names of the part files, in the order of their first steps, by one listing."""
    names = storage.names(trace_folder(run_id, trial_id))
    return [name for name in names if name.endswith(".parquet") and name[:-8].isdigit()]


def read_part(
    storage: Storage, path: str, columns: Sequence[str] | None, present: dict[str, None] | None = None
) -> pa.Table:
    """A part's rows; the names of all its columns but `step` are added to `present`.

    KeyError if it has no `step`: whatever it is, it is no part.
    """
    with storage.fs.open_input_file(storage.path(path)) as source:
        part = pq.ParquetFile(source)
        if "step" not in part.schema_arrow.names:
            raise KeyError("no column 'step'")
        if present is not None:
            present.update(dict.fromkeys(name for name in part.schema_arrow.names if name != "step"))
        wanted = None
        if columns is not None:
            wanted = [name for name in dict.fromkeys(["step", *columns]) if name in part.schema_arrow.names]
        return part.read(columns=wanted, use_threads=False)


def encode(table: pa.Table, metadata: Mapping[str, str]) -> pa.Buffer:
    """A part's bytes: zstd, with encodings that show it what neighbouring values share."""
    sink = pa.BufferOutputStream()
    # Step counts by one and neighbouring floats share their high bytes: both encodings show it to zstd.
    encodings = {
        column.name: "DELTA_BINARY_PACKED" if pa.types.is_integer(column.type) else "BYTE_STREAM_SPLIT"
        for column in table.schema
        if not pa.types.is_boolean(column.type)
    }
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding=encodings,
    )
    return sink.getvalue()


def part_table(columns: Mapping[str, Any]) -> pa.Table:
    arrays = {}
    for name, values in columns.items():
        kind = COLUMN_TYPES.get(name, pa.float32())
        mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
        arrays[name] = pa.array(np.ma.getdata(values) if mask is not None else values, kind, mask=mask)
    return pa.table(arrays)


def num_mergeable(parts: Sequence[Part]) -> int:
    """How many parts to merge, from the end: as many as there are while none outweighs the others.

    A part is so rewritten only when its merged part at least doubles it: log2(steps) times at most.
    """
    best, total, largest = 2, 0, 0
    for count, part in enumerate(reversed(parts), start=1):
        total += part.num_steps
        largest = max(largest, part.num_steps)
        if count > 2 and largest * 2 <= total:
            best = count
    return best

"""Whole traces as CSV, Parquet or Arrow, never sampled, streamed batch by batch."""

import io
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from service.problems import bad_parameter
from service.store import STANDARD_COLUMNS, Selection, Store
from service.views import metrics_in
from study.traces import COLUMN_TYPES, read_trace

BATCH_ROWS = 65_536


class Format(StrEnum):
    json = "json"
    csv = "csv"
    parquet = "parquet"
    arrow = "arrow"


MEDIA_TYPES = {
    Format.csv: "text/csv; charset=utf-8",
    Format.parquet: "application/vnd.apache.parquet",
    Format.arrow: "application/vnd.apache.arrow.stream",
}


class Drain(io.RawIOBase):
    """A file whose content is taken away as it is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self.written.append(piece)
        self.position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.position

    def take(self) -> bytes:
        """What was written since it was last taken."""
        taken, self.written = b"".join(self.written), []
        return taken


def _csv(sink: Drain, schema: pa.Schema) -> Any:
    return pyarrow.csv.CSVWriter(sink, schema)


def _parquet(sink: Drain, schema: pa.Schema) -> Any:
    return pq.ParquetWriter(sink, schema, compression="zstd")


def _arrow(sink: Drain, schema: pa.Schema) -> Any:
    return pa.ipc.new_stream(sink, schema)


WRITERS: dict[Format, Callable[[Drain, pa.Schema], Any]] = {
    Format.csv: _csv,
    Format.parquet: _parquet,
    Format.arrow: _arrow,
}


def schema_of(store: Store, selection: Selection, metrics: Sequence[str] | None) -> pa.Schema:
    """The columns of an export: which trial a row belongs to, its step, and the metrics asked for."""
    names: dict[str, None] = {}
    for row in selection.trials:
        names.update(dict.fromkeys(store.read(selection.run, row, ()).names))
    known = list(dict.fromkeys([*STANDARD_COLUMNS, *names]))
    for metric in metrics or ():
        if not metrics_in([metric], known):
            raise bad_parameter("metrics", f"unknown metric '{metric[:80]}'", known)
    wanted = list(names) if metrics is None else metrics_in(metrics, list(names))
    head = [
        ("trial", pa.string()),
        ("arm", pa.string()),
        ("seed", pa.int32()),
        ("step", COLUMN_TYPES["step"]),
    ]
    return pa.schema(
        head + [(name, COLUMN_TYPES.get(name, pa.float32())) for name in wanted if name != "step"]
    )


def stream(
    store: Store, selection: Selection, schema: pa.Schema, form: Format, first: int | None, last: int | None
) -> Iterator[bytes]:
    """The file in pieces, one trial after the other; as much memory as one trial's trace."""
    sink = Drain()
    num_rows = 0
    with WRITERS[form](sink, schema) as writer:
        for row in selection.trials:
            table = read_trace(
                store.storage_of(selection.run),
                selection.run["id"],
                row["id"],
                columns=schema.names[4:],
                first=max(first or 1, 1),
                last=last,
            ).table
            for start in range(0, table.num_rows, BATCH_ROWS):
                writer.write_table(_labelled(table.slice(start, BATCH_ROWS), row, schema))
                num_rows += table.num_rows
                if piece := sink.take():
                    yield piece
        if not num_rows:
            writer.write_table(schema.empty_table())  # else a CSV file has no header
    yield sink.take()


def _labelled(table: pa.Table, row: dict[str, Any], schema: pa.Schema) -> pa.Table:
    """A trial's rows with its name beside them, and null in columns that it lacks."""
    count = table.num_rows
    columns = {
        "trial": pa.array([row["id"]] * count, pa.string()),
        "arm": pa.array([row["arm"]] * count, pa.string()),
        "seed": pa.array(np.full(count, row["seed"], np.int32)),
    }
    for name in schema.names[3:]:
        present = name in table.column_names
        columns[name] = table.column(name) if present else pa.nulls(count, schema.field(name).type)
    return pa.table(columns, schema=schema)

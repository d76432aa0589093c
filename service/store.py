"""What the service reads: the catalogue's rows and the traces' columns, behind bounded caches.

No path is built from a URL: an id from a request is only ever compared with ids in the catalogue,
and paths come from the rows that were found.
"""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import fs

from service.cache import ByteCache
from service.problems import not_found
from service.sampling import Series
from service.settings import Settings
from study.catalogue import Catalogue
from study.storage import Storage, StorageError
from study.traces import read_trace, trace_folder

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\Z", re.ASCII)
TRIAL_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}_[0-9]{5}\Z", re.ASCII)
# Always there to ask for, even before the first part is.
STANDARD_COLUMNS = ("loss", "grad_norm", "grad_norm_clipped", "lr", "clip_threshold", "skipped", "loss_scale")
SETTLED_SECONDS = 60.0
FOUND_SECONDS = 5.0  # rows of a settled run are not read again for so long
# On an object store a listing is a request of its own: it is not repeated for so long.
LISTED_SECONDS, LISTED_SETTLED_SECONDS = 2.0, 300.0
SCHEMA_SECONDS = 10.0  # a schema that was known so long ago still is

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """What an `<id>` means: a run and its trials, or one of them (`narrow`)."""

    run: Row
    trials: list[Row]
    of: str = ""  # the trial's id, where it is one
    by_name: bool = True  # False for `latest`, which names another run tomorrow

    @property
    def name(self) -> str:
        """The id of what is meant, whatever was filtered away."""
        return self.of or self.run["id"]

    @property
    def narrow(self) -> bool:
        """Whether it is one trial."""
        return bool(self.of)

    @property
    def ended(self) -> bool:
        """Whether nothing about it will change any more."""
        if not self.by_name or not all(map(settled, self.trials)):
            return False
        return self.narrow or (self.run["status"] == "finished" and _long_ago(self.run["ended_at"]))


def settled(trial: Row) -> bool:
    """Whether a trial has ended, so long ago that its last numbers are written too."""
    return trial["status"] in ("finished", "diverged", "pruned") and _long_ago(trial["ended_at"])


def _long_ago(when: float | None) -> bool:
    return when is not None and when < time.time() - SETTLED_SECONDS


@dataclass(frozen=True)
class Recorded:
    """Columns of a trial's trace that were asked for, without the places that were not sampled."""

    series: dict[str, Series] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # every column that the trace has, `step` left out
    last_step: int = 0
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Series:
        return self.series.get(name, EMPTY)


EMPTY = Series(np.zeros(0, np.int32), np.zeros(0, np.float32))
Stamp = tuple[tuple[str, int, int], ...]


class Store:
    """The catalogue and the storage, as one thing to read from."""

    def __init__(self, settings: Settings) -> None:
        self.storage = Storage(settings.storage)
        self.catalogue = Catalogue(settings.database_url)
        self._known_until = 0.0  # when the schema is looked at again
        self._storages: dict[str, Storage] = {}
        self.columns: ByteCache[tuple[Stamp, Series]] = ByteCache(settings.trace_cache_mb << 20)
        self._found: ByteCache[tuple[float, Selection]] = ByteCache(8 << 20)
        self._stamps: ByteCache[tuple[float, Stamp]] = ByteCache(4 << 20)
        self._heads: ByteCache[tuple[Stamp, Recorded]] = ByteCache(4 << 20)

    def close(self) -> None:
        self.catalogue.engine.dispose()

    def check(self) -> None:
        """CatalogueError unless the database can be read and its schema is the one that this code knows."""
        if self.is_empty():
            return
        self.catalogue.check()

    def is_empty(self) -> bool:
        """Whether no run was ever started here: no database yet, or one without our tables.

        CatalogueError if the schema is not this code's or the database is away.
        """
        if not self.catalogue.has_database():
            return True
        if time.monotonic() < self._known_until:
            return False
        version = self.catalogue.schema_version()
        if version is not None:
            self.catalogue.check()
            self._known_until = time.monotonic() + SCHEMA_SECONDS
        return version is None

    def find(self, identifier: str) -> Selection:
        """The run or trial that `<id>` names; a 404 Problem if there is none. Rows are not to be changed."""
        known = self._found.get(identifier)
        if known is not None and known[0] > time.monotonic() - FOUND_SECONDS:
            return known[1]
        selection = self._find(identifier)
        if selection.ended:
            self._found.put(identifier, (time.monotonic(), selection), 8000 * (1 + len(selection.trials)))
        return selection

    def _find(self, identifier: str) -> Selection:
        if not (RUN_ID.match(identifier) or TRIAL_ID.match(identifier)) or self.is_empty():
            raise not_found(identifier)
        if TRIAL_ID.match(identifier):
            trial = self.catalogue.trial(identifier)
            run = self.catalogue.run(trial["run_id"]) if trial else None
            if trial is None or run is None:
                raise not_found(identifier)
            return Selection(run, [trial], of=trial["id"])
        run = self.catalogue.run(identifier)
        if run is None:
            raise not_found(identifier)
        return Selection(run, self.catalogue.trials(run["id"]), by_name=identifier != "latest")

    def storage_of(self, run: Row) -> Storage:
        """Where a run's traces lie: this service's storage, else the one that the run was started with."""
        known = self._storages.get(run["id"])
        if known is not None:
            return known
        if self.storage.exists(run["id"]):
            self._storages[run["id"]] = self.storage
            return self.storage
        try:
            other = Storage(run["storage"])
            if other.exists(run["id"]):
                self._storages[run["id"]] = other
                return other
        except StorageError:
            pass  # its own place is unknown here; ours will be looked at, and be found empty
        return self.storage

    def stamp(self, run: Row, trial: Row) -> Stamp:
        """Names, sizes and times of a trial's parts, by one listing: changes when the trace does."""
        storage = self.storage_of(run)
        if storage.is_local:
            return self._list(storage, run, trial)
        patience = LISTED_SETTLED_SECONDS if settled(trial) else LISTED_SECONDS
        known = self._stamps.get(trial["id"])
        if known is None or known[0] < time.monotonic() - patience:
            known = (time.monotonic(), self._list(storage, run, trial))
            self._stamps.put(trial["id"], known, 200 + 100 * len(known[1]))
        return known[1]

    @staticmethod
    def _list(storage: Storage, run: Row, trial: Row) -> Stamp:
        folder = storage.path(trace_folder(run["id"], trial["id"]))
        infos = storage.fs.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        files = [info for info in infos if info.type == fs.FileType.File]
        return tuple(sorted((info.base_name, info.size or 0, info.mtime_ns or 0) for info in files))

    def read(self, run: Row, trial: Row, columns: Iterable[str]) -> Recorded:
        """Columns of a trial's trace. `prefix/*` means every column of that group.

        A trial without parts has no points, an unreadable part is named in `warnings`; neither fails.
        """
        stamp = self.stamp(run, trial)
        head = self._heads.get(trial["id"])
        if head is None or head[0] != stamp:
            head = (stamp, self._read_head(run, trial, stamp))
            self._heads.put(trial["id"], head, 1000)
        names = head[1].names
        series: dict[str, Series] = {}
        missing = []
        for name in _expand(columns, names):
            known = self.columns.get((trial["id"], name))
            if known is not None and known[0] == stamp:
                series[name] = known[1]
            elif name in names:
                missing.append(name)
        if missing:
            trace = read_trace(self.storage_of(run), run["id"], trial["id"], columns=missing)
            for name in missing:
                series[name] = _series(trace.table, name)
                size = series[name].steps.nbytes + series[name].values.nbytes
                self.columns.put((trial["id"], name), (stamp, series[name]), size)
        return Recorded(series, names, head[1].last_step, head[1].warnings)

    def _read_head(self, run: Row, trial: Row, stamp: Stamp) -> Recorded:
        """Column names, last step and warnings: what a trace is, without its columns."""
        if not stamp:
            missing = trial["step"] > 0
            gone = (f"trial {trial['id']}: no part of its trace is there",) if missing else ()
            return Recorded(warnings=gone)
        trace = read_trace(self.storage_of(run), run["id"], trial["id"], columns=[])
        parts = (text.split(":")[0] for text in trace.unreadable)
        warnings = tuple(f"trial {trial['id']}: part {name} can't be read" for name in parts)
        steps = trace.table.column("step")
        last = steps[-1].as_py() if len(steps) else 0
        return Recorded(names=trace.names, last_step=last, warnings=warnings)


def _expand(columns: Iterable[str], names: Sequence[str]) -> list[str]:
    wanted: list[str] = []
    for column in columns:
        prefix = column.removesuffix("*")
        wanted += [column] if prefix == column else [name for name in names if name.startswith(prefix)]
    return list(dict.fromkeys(wanted))


def _series(table: pa.Table, name: str) -> Series:
    """One column with its steps; rows where it was not sampled (null) are left out."""
    steps = table.column("step").to_numpy()
    if name not in table.column_names:
        return EMPTY
    column = table.column(name)
    if column.null_count:
        valid = column.is_valid().to_numpy()
        column, steps = column.drop_null(), steps[valid]
    values = column.to_numpy()
    return Series(steps, values if values.dtype.kind == "f" else values.astype(np.float32))

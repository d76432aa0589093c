"""Passes a trial's rows on to its loggers: each step once and in order, and never at the trial's cost.

The trace stays the record. What a logger lacks as a trial goes on from a checkpoint is read from the
trace, what it has already is not given again. One that fails is left out from then on; the trial goes
on, and its notes say so. No torch, no Ray.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.variants import build, one_line
from study.loggers import LOGGERS, Columns, LoggedTrial, Logger
from study.storage import Storage
from study.traces import read_trace
from study.validation import ConfigError

NOTHING: Mapping[str, Any] = {}


def check_loggers(specs: Sequence[Mapping[str, Any]], storage: Storage, where: str = "") -> None:
    """ConfigError if a study's loggers can't log here: a package is absent, a storage remote, a name twice."""
    names = [spec["name"] for spec in specs]
    for name, spec in zip(names, specs, strict=True):
        logger = build("logger", LOGGERS, spec)
        place = f"({where}: loggers)"
        if names.count(name) > 1:
            raise ConfigError(f"logger '{name}' is given twice; known: once each {place}")
        if importlib.util.find_spec(logger.package) is None:
            extra = f"gradnorm-study[{logger.extra}]"
            raise ConfigError(
                f"logger {name} needs the package {logger.package}; run: pip install '{extra}' {place}"
            )
        try:
            logger.check(storage)
        except ValueError as error:
            raise ConfigError(f"logger {name}: {error} {place}") from error


def prepare_loggers(specs: Sequence[Mapping[str, Any]], say: Callable[[str], Any]) -> None:
    """Once a run, before its first trial; says what goes wrong. Trials try again, each for itself."""
    for spec in specs:
        try:
            build("logger", LOGGERS, spec).prepare()
        except Exception as error:  # noqa: BLE001 (whatever its package raises)
            say(f"warning: logger {spec['name']}: {one_line(error)}")


class Loggers:
    """The loggers of one trial; use as a context manager. `notes`: which gave up, and why."""

    def __init__(self, specs: Sequence[Mapping[str, Any]], trial: LoggedTrial) -> None:
        self.trial, self.step = trial, trial.after
        self.notes: list[str] = []
        self._held: dict[str, int] = {}  # the last step that a logger has
        self._open: dict[str, Logger] = {spec["name"]: build("logger", LOGGERS, spec) for spec in specs}
        self._each(self._begin)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What has not ended failed, or was stopped: by a scheduler, or with its run."""
        self.end("failed" if kind is not None and issubclass(kind, Exception) else "stopped")

    def _begin(self, name: str, logger: Logger) -> None:
        held = self._held[name] = logger.begin(self.trial)
        if held < self.trial.after:
            logger.log(_recorded(self.trial, held + 1))

    def log(self, columns: Columns) -> None:
        """Pass rows on; call it before the checkpoint that holds them."""
        self._each(lambda name, logger: self._log(name, logger, columns))
        self.step = int(columns["step"][-1])

    def _log(self, name: str, logger: Logger, columns: Columns) -> None:
        new = columns["step"] > self._held[name]
        if new.any():
            logger.log(columns if new.all() else {key: values[new] for key, values in columns.items()})

    def end(self, status: str, summary: Mapping[str, Any] = NOTHING) -> None:
        """Close all; the first call counts."""
        self._each(lambda _, logger: logger.end(status, self.step, summary))
        self._open = {}

    def _each(self, work: Callable[[str, Logger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                work(name, logger)
            except Exception as error:  # noqa: BLE001 (whatever its package raises, the trial goes on)
                del self._open[name]
                self.notes.append(f"logger {name} gave up at step {self.step}: {one_line(error)}")


def _recorded(trial: LoggedTrial, first: int) -> dict[str, Any]:
    """The trace's rows from `first` to where the trial goes on, masked where not sampled."""
    table = read_trace(trial.storage, trial.run_id, trial.trial_id, first=first, last=trial.after).table
    return {
        name: np.ma.array(table.column(name).to_numpy(), mask=table.column(name).is_null().to_numpy())
        for name in table.column_names
    }

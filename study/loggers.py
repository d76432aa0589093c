"""Loggers: what a trial records, passed on as it comes to TensorBoard, MLflow or Weights & Biases.

One class a logger; its package is imported as it begins, in a worker. What it is given, and what
becomes of its failures, is in forwarding.py. No torch, no Ray.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from study.selectors import Scalar
from study.storage import Storage

MAX_BATCH = 1000  # metrics of one MLflow request: its servers take no more
MAX_PARAMS = 100  # the same of params

Columns = Mapping[str, Any]  # name -> array, masked where not sampled; `step` among them


@dataclass(frozen=True)
class LoggedTrial:
    """What a logger is told of a trial as it begins, or goes on."""

    run_id: str
    trial_id: str
    arm: str
    config: dict[str, Scalar]  # dotted field -> setting
    storage: Storage
    attempt: int  # 1: no step of it was recorded before
    after: int  # the step from which it goes on

    def folder(self, kind: str, elsewhere: str | None) -> str:
        """Where its files of that kind go: beside its traces, unless in a folder `elsewhere`; made."""
        beside = self.storage.path(f"{self.run_id}/{kind}")
        path = f"{os.path.expanduser(elsewhere or beside)}/{self.trial_id}"
        os.makedirs(path, exist_ok=True)
        return path


class Logger:
    """One place that rows go to; all of its methods may raise whatever its package raises."""

    package = ""  # what is imported
    extra = ""  # of ours, that installs it

    def check(self, storage: Storage) -> None:
        """ValueError if it can't log what lies in `storage`."""

    def prepare(self) -> None:
        """Make, once a run and before its trials, what two workers would trip over if both made it."""

    def begin(self, trial: LoggedTrial) -> int:
        """Open it; the last step that it holds of this trial, the steps before it included."""
        raise NotImplementedError

    def log(self, columns: Columns) -> None:
        """Take rows; what a checkpoint may follow is not lost by a kill."""
        raise NotImplementedError

    def end(self, status: str, step: int, summary: Mapping[str, Any]) -> None:
        """Close it. `status`: how the trial ended, or failed or stopped, to go on later."""
        raise NotImplementedError


def _rows(columns: Columns) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, values) of each row; what was not sampled is left out."""
    lists = {name: values.tolist() for name, values in columns.items() if name != "step"}
    for index, step in enumerate(columns["step"].tolist()):
        yield step, {name: float(one[index]) for name, one in lists.items() if one[index] is not None}


def _check_folder(folder: str | None, storage: Storage) -> None:
    if folder is None and not storage.is_local:
        raise ValueError(f"its files are appended to, which '{storage.uri}' can't: give it a folder")


class TensorBoard(Logger):
    """Event files in `<run>/tensorboard/<trial>/` of a local storage, or in `<folder>/<trial>/`.

    Every column is a scalar, NaN and inf as they are; settings are in the HParams tab and as text. As a
    trial goes on, later steps that are there are purged (the event that a purge_step writes), so it
    relies on having written all earlier ones: they are on the disk before a checkpoint is.
    """

    package, extra = "tensorboardX", "tensorboard"

    def __init__(self, *, folder: str | None = None) -> None:
        self.folder = folder

    def check(self, storage: Storage) -> None:
        _check_folder(self.folder, storage)

    def begin(self, trial: LoggedTrial) -> int:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        here = trial.folder("tensorboard", self.folder)
        # Without the attempt, one that begins within the same second would write over the last one's file.
        self.writer = EventsWriter(f"{here}/events", f".{trial.attempt:03d}.{os.getpid()}")
        start = SessionLog(status=SessionLog.START)
        purge_step = trial.after + 1 if trial.after else 0
        self.writer.write_event(Event(wall_time=time.time(), step=purge_step, session_log=start))
        if not trial.after:
            shown = {key: value for key, value in trial.config.items() if value is not None}
            for part in summary.hparams(shown, dict.fromkeys(("loss", "grad_norm"), 0.0))[:2]:
                self._write(0, part)
            table = {"arm": trial.arm} | trial.config
            self._write(0, summary.text("config", _markdown(table)))
        self.writer.flush()
        return trial.after

    def _write(self, step: int, content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self.writer.write_event(Event(wall_time=time.time(), step=step, summary=content))

    def log(self, columns: Columns) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        for step, values in _rows(columns):
            found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(step, Summary(value=found))
        self.writer.flush()

    def end(self, status: str, step: int, summary: Mapping[str, Any]) -> None:
        from tensorboardX.summary import text

        if status not in ("failed", "stopped"):
            self._write(step, text("result", _markdown({"status": status} | dict(summary))))
        self.writer.close()


def _markdown(table: Mapping[str, Any]) -> str:
    lines = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in table.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


class MLflow(Logger):
    """A run a trial of an experiment of MLflow's, in requests of up to 1,000 metrics each.

    Found again by its tag `gradnorm.trial`; `tracking_uri` is MLflow's own where none is given. MLflow
    keeps NaN, and inf as the largest double. What the summary says are metrics `summary/...`.
    """

    package, extra = "mlflow", "mlflow"

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "gradnorm-study") -> None:
        self.tracking_uri, self.experiment = tracking_uri, experiment
        self.last: dict[str, int] = {}  # the last step of each metric

    def prepare(self) -> None:
        """The experiment, and the tables where its address is a database: MLflow makes them unlocked."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds; a trial waits for it
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=self.tracking_uri)
        found = self.client.get_experiment_by_name(self.experiment)
        self.experiment_id = found.experiment_id if found else self.client.create_experiment(self.experiment)

    def begin(self, trial: LoggedTrial) -> int:
        from mlflow.entities import Param

        self.prepare()
        identity = f"{trial.storage.uri}/{trial.run_id}/{trial.trial_id}"
        found = self.client.search_runs(
            [self.experiment_id],
            f"tags.`gradnorm.trial` = '{identity}'",
            order_by=["start_time DESC"],
            max_results=1,
        )
        # One with steps of a trial that has none is of a run by the same name that was deleted.
        if found and (trial.attempt > 1 or not found[0].data.metrics):
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            self.last = {name: self._last_step(name) for name in found[0].data.metrics}
        else:
            tags = {"gradnorm.trial": identity, "gradnorm.run": trial.run_id, "gradnorm.arm": trial.arm}
            created = self.client.create_run(self.experiment_id, run_name=trial.trial_id, tags=tags)
            self.run = created.info.run_id
        params = [Param(key, str(value)) for key, value in trial.config.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(self.run, params=params[first : first + MAX_PARAMS])
        steps = [step for name, step in self.last.items() if not name.startswith("summary/")]
        return min(steps, default=0)

    def _last_step(self, name: str) -> int:
        return max(metric.step for metric in self.client.get_metric_history(self.run, name))

    def log(self, columns: Columns) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch: list[Any] = []
        for step, values in _rows(columns):
            # By name: a store that was cut off in a batch may have kept some of its metrics.
            new = [
                Metric(name, value, now, step)
                for name, value in values.items()
                if step > self.last.get(name, 0)
            ]
            if len(batch) + len(new) > MAX_BATCH:
                self._send(batch)
                batch = []
            batch += new
        self._send(batch)

    def _send(self, batch: Sequence[Any]) -> None:
        for first in range(0, len(batch), MAX_BATCH):
            self.client.log_batch(self.run, metrics=batch[first : first + MAX_BATCH])

    def end(self, status: str, step: int, summary: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        numbers = {
            f"summary/{key}": value for key, value in summary.items() if isinstance(value, int | float)
        }
        metrics = [
            Metric(key, float(value), now, step) for key, value in numbers.items() if key not in self.last
        ]
        words = {key: value for key, value in summary.items() if isinstance(value, str)}
        tags = [RunTag(f"gradnorm.{key}", value) for key, value in ({"status": status} | words).items()]
        self.client.log_batch(self.run, metrics=metrics, tags=tags)
        ended = {"failed": "FAILED", "stopped": "KILLED"}.get(status, "FINISHED")
        self.client.set_terminated(self.run, status=ended)


class WandB(Logger):
    """A run a trial of a project of Weights & Biases; its files in `<run>/wandb/<trial>/`, or `folder`.

    Settings are its config, the run is its group; NaN and inf are shown as such. Online, a trial goes on
    after the last step that the server has; offline, nothing can be asked, and steps between the last
    checkpoint and a kill are in two of its folders.
    """

    package, extra = "wandb", "wandb"

    def __init__(
        self, *, project: str = "gradnorm-study", entity: str | None = None,
        mode: Literal["online", "offline"] = "online", folder: str | None = None,
    ) -> None:  # fmt: skip
        self.project, self.entity, self.mode, self.folder = project, entity, mode, folder

    def check(self, storage: Storage) -> None:
        _check_folder(self.folder, storage)

    def begin(self, trial: LoggedTrial) -> int:
        import wandb

        # A folder an attempt: two that begin within a second would be given the same name in one.
        here = f"{trial.folder('wandb', self.folder)}/{trial.attempt:03d}"
        os.makedirs(here, exist_ok=True)
        self.run = wandb.init(
            project=self.project, entity=self.entity, mode=self.mode, dir=here, reinit="create_new",
            id=trial.trial_id, name=trial.arm, group=trial.run_id, config=dict(trial.config), resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, x_disable_stats=True),
        )  # fmt: skip
        return self.run.step - 1 if self.mode == "online" and self.run.step else trial.after

    def log(self, columns: Columns) -> None:
        for step, values in _rows(columns):
            self.run.log(values, step=step)

    def end(self, status: str, step: int, summary: Mapping[str, Any]) -> None:
        self.run.summary.update({"status": status, "last_step": step} | dict(summary))
        self.run.finish(exit_code=1 if status in ("failed", "stopped") else 0)


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}

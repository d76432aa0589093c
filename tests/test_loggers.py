"""Loggers: what other tools are told of a trial, read back with their own readers."""

import json
import math
import socket
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.variants import VariantError
from study.config import ConfigError, load_study
from study.forwarding import Loggers, check_loggers
from study.loggers import LOGGERS, LoggedTrial, TensorBoard
from study.runs import Place, start_run
from study.storage import Storage
from study.traces import TraceWriter

STEPS = 400
CONFIG = {"model.norm": "rms", "optimizer.lr": 0.01, "compile": False, "model.block.init": None}


def rows(first: int, last: int) -> dict[str, Any]:
    """Columns as a flush gives them: NaN, inf, and one that is sampled every seventh step."""
    steps = np.arange(first, last + 1, dtype=np.int32)
    values = np.sqrt(steps.astype(np.float32))
    loss = np.where(steps == 77, np.float32(np.nan), values)
    norm = np.where(steps == 78, np.float32(np.inf), values * 3)
    sampled = np.ma.array(values * 5, mask=steps % 7 != 0)
    return {"step": steps, "loss": loss, "grad_norm": norm, "skipped": steps % 2 == 0, "act_rms/b": sampled}


def expected() -> dict[str, dict[int, float]]:
    columns = rows(1, STEPS)
    found: dict[str, dict[int, float]] = {}
    for name in ("loss", "grad_norm", "skipped", "act_rms/b"):
        pairs = zip(columns["step"].tolist(), np.ma.asarray(columns[name]).tolist(), strict=True)
        found[name] = {step: float(value) for step, value in pairs if value is not None}
    return found


def trial_of(folder: Path, attempt: int = 1, after: int = 0, name: str = "cut") -> LoggedTrial:
    return LoggedTrial(name, f"{name}_00000", "rms | clip 1", CONFIG, Storage(folder), attempt, after)


def in_pieces(folder: Path, specs: list[Any], lost: int = 0) -> Loggers:
    """A trial of STEPS steps, killed twice: after steps that no checkpoint holds, and before `lost` steps,
    which are in the trace and were checkpointed, reached the loggers."""
    writer = TraceWriter(Storage(folder), "cut", "cut_00000")
    first = Loggers(specs, trial_of(folder))
    for begin in (1, 61, 121):
        writer.append(rows(begin, begin + 59))
        first.log(rows(begin, begin + 59))
    assert not first.notes
    writer = TraceWriter(Storage(folder), "cut", "cut_00000", after=120)
    second = Loggers(specs, trial_of(folder, writer.attempt, 120))
    for begin in (121, 181, 241):
        writer.append(rows(begin, begin + 59))
        if begin != 241 or not lost:
            second.log(rows(begin, begin + 59))
    writer = TraceWriter(Storage(folder), "cut", "cut_00000", after=300)
    assert not second.notes and writer.attempt == 3
    with Loggers(specs, trial_of(folder, writer.attempt, 300)) as third:
        third.log(rows(301, STEPS))
        third.end("finished", {"final_loss": 2.5, "peak_step": None, "reason": None})
    return third


def assert_same(found: dict[str, list[tuple[int, float]]]) -> None:
    """Every step once, in order, and every value as it was."""
    for name, values in expected().items():
        assert [step for step, _ in found[name]] == list(values), name
        for step, value in found[name]:
            assert value == pytest.approx(values[step], rel=1e-7, nan_ok=True), (name, step)


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads, every point of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_tensorboard_shows_every_step_once_after_two_kills(elsewhere: bool, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path / "boards")} if elsewhere else {}
    assert not in_pieces(tmp_path / "runs", [{"name": "tensorboard", **options}]).notes
    folder = tmp_path / ("boards/cut_00000" if elsewhere else "runs/cut/tensorboard/cut_00000")
    assert len(list(folder.iterdir())) == 3
    assert_same(scalars(folder))


def test_tensorboard_has_the_settings_and_the_end(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    in_pieces(tmp_path, [{"name": "tensorboard"}])
    events = EventAccumulator(str(tmp_path / "cut/tensorboard/cut_00000"))
    events.Reload()
    (config,), (result,) = (events.Tensors(f"{tag}/text_summary") for tag in ("config", "result"))
    text = config.tensor_proto.string_val[0].decode()
    assert "| arm | rms \\| clip 1 |" in text and "| model.norm | rms |" in text
    assert "| final_loss | 2.5 |" in result.tensor_proto.string_val[0].decode()
    assert events.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name == "hparams"


def test_remote_storage_needs_a_folder_for_tensorboard() -> None:
    remote = Storage("s3://bucket/runs?endpoint_override=http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"logger tensorboard: .* give it a folder \(study.yaml: loggers\)"):
        check_loggers([{"name": "tensorboard"}], remote, "study.yaml")
    check_loggers([{"name": "tensorboard", "folder": "boards"}], remote)


# MLflow


def mlflow_spec(folder: Path) -> dict[str, Any]:
    return {"name": "mlflow", "tracking_uri": f"sqlite:///{folder}/mlflow.db", "experiment": "stability"}


def mlflow_runs(folder: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("stability")
    return client, client.search_runs([experiment.experiment_id])


@pytest.mark.parametrize("lost", [0, 60])
def test_mlflow_has_every_step_once_after_two_kills(lost: int, tmp_path: Path) -> None:
    assert not in_pieces(tmp_path, [mlflow_spec(tmp_path)], lost).notes
    client, (run,) = mlflow_runs(tmp_path)
    history = {name: client.get_metric_history(run.info.run_id, name) for name in expected()}
    found = {name: [(one.step, one.value) for one in points] for name, points in history.items()}
    assert found["grad_norm"][77] == (78, sys.float_info.max), "MLflow's way to keep inf"
    found["grad_norm"][77] = (78, math.inf)
    assert_same(found)
    assert run.info.status == "FINISHED" and run.data.tags["gradnorm.status"] == "finished"
    assert run.data.params["model.norm"] == "rms" and run.data.tags["gradnorm.arm"] == "rms | clip 1"
    assert run.data.metrics["summary/final_loss"] == 2.5


def test_mlflow_takes_no_more_than_a_thousand_metrics_a_request(tmp_path: Path) -> None:
    """Its servers refuse more; wide rows make the batches short, one row wider than a request many."""
    steps = np.arange(1, 4, dtype=np.int32)
    wide = {f"act_rms/{number}": np.ones(3, np.float32) for number in range(1100)}
    with Loggers([mlflow_spec(tmp_path)], trial_of(tmp_path)) as loggers:
        loggers.log({"step": steps, **wide})
    assert not loggers.notes
    client, (run,) = mlflow_runs(tmp_path)
    assert len(run.data.metrics) == 1100 and run.info.status == "KILLED"
    assert [one.step for one in client.get_metric_history(run.info.run_id, "act_rms/1099")] == [1, 2, 3]


def test_mlflow_begins_anew_where_a_run_of_the_same_name_was_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        with Loggers([mlflow_spec(tmp_path)], trial_of(tmp_path)) as loggers:
            loggers.log(rows(1, 10))
    client, runs = mlflow_runs(tmp_path)
    assert [len(client.get_metric_history(run.info.run_id, "loss")) for run in runs] == [10, 10]


# Weights & Biases


def wandb_records(path: Path) -> list[bytes]:
    """The records of a .wandb file: blocks of 32 KiB after LevelDB's log, the first with 7 bytes of a head."""
    content, place, records, part = path.read_bytes(), 7, [], b""
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            records.append(part)
            part = b""
    return records


def test_wandb_keeps_every_step_of_a_trial_offline(tmp_path: Path) -> None:
    """Whole where nobody disturbed it; after a kill, each folder holds its attempt from its checkpoint on."""
    from wandb.proto import wandb_internal_pb2

    writer = TraceWriter(Storage(tmp_path), "cut", "cut_00000")
    specs = [{"name": "wandb", "mode": "offline"}]
    with Loggers(specs, trial_of(tmp_path)) as loggers:
        writer.append(rows(1, 100))
        loggers.log(rows(1, 100))
    with Loggers(specs, trial_of(tmp_path, 2, 100)) as loggers:
        loggers.log(rows(101, STEPS))
        loggers.end("finished", {"final_loss": 2.5})
    assert not loggers.notes
    found: dict[int, dict[str, float]] = {}
    for path in sorted((tmp_path / "cut/wandb/cut_00000").rglob("*.wandb")):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                }
                assert record.history.step.num not in found
                found[record.history.step.num] = {key: json.loads(value) for key, value in items.items()}
    assert sorted(found) == list(range(1, STEPS + 1))
    for name, values in expected().items():
        for step, value in values.items():
            assert float(found[step][name]) == pytest.approx(value, nan_ok=True), (name, step)


# What goes wrong


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_server_that_is_away_is_noted_and_costs_the_other_loggers_nothing(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if hangs:
            silent.listen()
        away = {"name": "mlflow", "tracking_uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with Loggers([away, {"name": "tensorboard"}], trial_of(tmp_path)) as loggers:
            loggers.log(rows(1, STEPS))
    assert len(loggers.notes) == 1
    assert loggers.notes[0].startswith("logger mlflow gave up at step 0: MlflowException: ")
    assert_same(scalars(tmp_path / "cut/tensorboard/cut_00000"))


def test_logger_that_fails_in_the_middle_is_left_out_until_the_trial_goes_on(tmp_path: Path) -> None:
    """Its table is gone for a while; a resume then brings what it lacks from the trace."""
    specs = [mlflow_spec(tmp_path)]
    writer = TraceWriter(Storage(tmp_path), "cut", "cut_00000")
    database = sqlite3.connect(tmp_path / "mlflow.db")
    with Loggers(specs, trial_of(tmp_path)) as loggers:
        for begin in (1, 101, 201):
            writer.append(rows(begin, begin + 99))
            if begin == 101:
                database.execute("alter table metrics rename to hidden")
                database.commit()
            loggers.log(rows(begin, begin + 99))
    assert len(loggers.notes) == 1 and "gave up at step 100" in loggers.notes[0]
    assert "\n" not in loggers.notes[0]
    database.execute("alter table hidden rename to metrics")
    database.commit()
    database.close()
    writer = TraceWriter(Storage(tmp_path), "cut", "cut_00000", after=300)
    with Loggers(specs, trial_of(tmp_path, writer.attempt, 300)) as loggers:
        loggers.log(rows(301, STEPS))
    assert not loggers.notes
    client, (run,) = mlflow_runs(tmp_path)
    for name, values in expected().items():
        points = client.get_metric_history(run.info.run_id, name)
        assert [one.step for one in points] == list(values), name


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "[tensorbord]",
            "unknown logger 'tensorbord', did you mean 'tensorboard'?; known: mlflow, tensorboard",
        ),
        ("[{name: mlflow, projct: x}]", "unknown option of logger 'mlflow' 'projct'; known: experiment"),
        ("[{name: wandb, mode: ofline}]", "logger mode: input should be 'online' or 'offline', got 'ofline'"),
    ],
)
def test_logger_that_is_none_is_one_line(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_study("figure", [f"loggers={override}"])
    assert said in str(caught.value) and "loggers.0" in str(caught.value)


def test_study_file_names_a_logger_as_it_names_any_variant() -> None:
    named, spelled = (load_study("figure", [f"loggers={spec}"]) for spec in ("[mlflow]", "[{name: mlflow}]"))
    assert named.loggers == spelled.loggers
    assert named.loggers == [{"name": "mlflow", "tracking_uri": None, "experiment": "gradnorm-study"}]
    assert load_study("figure").loggers == []


def test_logger_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logger 'tensorboard' is given twice"):
        check_loggers([{"name": "tensorboard"}, {"name": "tensorboard", "folder": "x"}], Storage(tmp_path))


def test_absent_package_is_said_at_the_start_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorBoard, "package", "no_such_package")
    place = Place.of(str(tmp_path / "runs"), None)
    with pytest.raises(ConfigError) as caught:
        start_run("figure", ["loggers=[tensorboard]"], "absent", place, Console(quiet=True))
    assert str(caught.value) == (
        "logger tensorboard needs the package no_such_package; run: pip install 'gradnorm-study[tensorboard]' "
        "(study/presets/figure.yaml: loggers)"
    )
    assert not (tmp_path / "runs").exists()


def test_trial_without_loggers_imports_none_of_their_packages(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import study.worker, study.config\n"
        "from tests.test_loggers import trial_of; from study.forwarding import Loggers\n"
        f"loggers = Loggers([], trial_of(Path({str(tmp_path)!r}))); loggers.end('finished')\n"
        "assert not {'tensorboardX', 'tensorboard', 'mlflow', 'wandb'} & set(sys.modules)\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(LOGGERS))
def test_every_logger_names_its_package_and_extra(name: str) -> None:
    import tomllib

    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert LOGGERS[name].package and LOGGERS[name].extra in extras
    with pytest.raises((VariantError, TypeError)):
        LOGGERS[name](no_such_option=1)  # type: ignore[call-arg]

"""Real runs of somebody's own model: workers find it, and a mistake ends in one line and status 2."""

import sqlite3
from pathlib import Path

import pytest
from driving import ROOT, assert_exact, catalogue_of, run
from test_imported import BROUGHT

from study.storage import Storage
from study.traces import read_trace

STUDY = """
trial:
  model: {import: own_model:build, context_length: 16, width: 12}
  loss: {import: own_model:smoothed, smoothing: 0.05}
  optimizer: {import: own_model:signs, lr: 1.0e-3}
  data: {import: own_model:count_up, length: 5000}
  batch_size: 4
  steps: 150
arms:
  - {label: "clip 1", clip.max_norm: 1.0}
  - {label: "dropout", model.dropout: 0.2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module and a study of its own."""
    (tmp_path / "own_model.py").write_text(BROUGHT)
    (tmp_path / "own.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.ray
@pytest.mark.slow
def test_a_study_finds_what_it_imports_beside_itself_and_its_traces_are_exact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output = run("own.yaml", "--storage", folder / "runs", "--run-id", "own")
    assert status == 0, output
    monkeypatch.syspath_prepend(str(folder))
    assert_exact(folder / "runs", "own")
    trials = catalogue_of(folder / "runs").trials("own")
    assert [trial["arm"] for trial in trials] == ["clip 1", "dropout"]
    assert trials[0]["config"]["model"]["import"] == "own_model:build"
    assert trials[0]["num_parameters"] > 0
    stored = catalogue_of(folder / "runs").run("own")
    assert stored is not None and stored["data"][0]["name"] == "own_model:count_up"
    with sqlite3.connect(folder / "runs" / "gradnorm.db") as database:
        database.execute("UPDATE gradnorm_trials SET status = 'pending' WHERE number = 1")
    monkeypatch.chdir(ROOT)
    status, output = run("--resume", "own", "--storage", folder / "runs")
    assert (status, len(output.strip().splitlines())) == (2, 1), output
    assert "no module 'own_model' for model; looked in" in output and "(run 'own': trial.model)" in output


@pytest.mark.ray
@pytest.mark.slow
def test_the_example_with_a_hugging_face_model_runs(tmp_path: Path) -> None:
    study = ROOT / "examples" / "hf_causal_lm.yaml"
    status, output = run(study, "--set", "trial.steps=30", "--storage", tmp_path, "--run-id", "llama")
    assert status == 0, output
    trials = catalogue_of(tmp_path).trials("llama")
    assert [trial["arm"] for trial in trials] == ["clip 1", "clip 0.1", "zclip"]
    for trial in trials:
        trace = read_trace(Storage(tmp_path), "llama", trial["id"])
        assert trace.numpy("step").tolist() == list(range(1, 31))
        assert {"grad_norm/block3.self_attn", "act_rms/block0"} <= set(trace.columns())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trial.model.import=own_modle:build", "no module 'own_modle' for model; looked in"),
        ("trial.model.import=own_model:biuld", "did you mean 'build'?"),
        ("trial.model.widht=3", "model 'own_model:build' can't be made: TypeError"),
        (
            "trial.data.lenght=3",
            "unknown option of data 'own_model:count_up' 'lenght', did you mean 'length'?",
        ),
        (
            "trial.data.import=own_model:fails",
            "data 'own_model:fails' can't be made: OSError: the disk is gone",
        ),
    ],
)
def test_a_mistake_ends_in_one_line_before_anything_is_made(folder: Path, override: str, says: str) -> None:
    status, output = run("own.yaml", "--set", override, "--storage", folder / "runs")
    assert (status, len(output.strip().splitlines())) == (2, 1), output
    assert output.startswith("error: ") and says in output
    assert not (folder / "runs").exists()

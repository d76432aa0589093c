"""Whole traces as files: every row, every bit, whatever the trace went through."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest


def table_of(answer, form) -> pa.Table:
    source = io.BytesIO(answer.content)
    if form == "csv":
        return pyarrow.csv.read_csv(source)
    return pq.read_table(source) if form == "parquet" else pa.ipc.open_stream(source).read_all()


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_an_export_has_every_row_and_every_bit(client_of, store, form):
    norms = np.exp(np.random.default_rng(0).standard_normal(70_000)).astype(np.float32)
    norms[5], norms[6], norms[7] = np.nan, np.inf, -np.inf
    sparse = np.ma.array(norms, mask=np.arange(70_000) % 100 != 0)
    columns = {"step": np.arange(1, 70_001), "grad_norm": norms, "val_loss": sparse}
    store.add_run("r", arms=2, steps=70_000, traces={(0, 0): columns})
    answer = client_of(store).get(f"/runs/r/traces?format={form}&points=4")
    assert answer.status_code == 200
    assert f'filename="r.{form}"' in answer.headers["content-disposition"]
    table = table_of(answer, form)
    first = table.filter(pa.compute.equal(table["trial"], "r_00000"))
    assert first["step"].to_pylist() == list(range(1, 70_001))
    found = np.array(first["grad_norm"].to_pylist(), np.float64).astype(np.float32)
    assert np.array_equal(found, norms, equal_nan=True)
    assert first["val_loss"].null_count == 70_000 - 700
    assert table.num_rows == 140_000


def test_an_export_can_be_narrowed(client_of, store):
    store.add_run("r")
    answer = client_of(store).get("/runs/r/traces?format=csv&metrics=loss&trials=1,2&from=11&to=20")
    table = table_of(answer, "csv")
    assert table.column_names == ["trial", "arm", "seed", "step", "loss"]
    assert table.num_rows == 20
    assert set(table["step"].to_pylist()) == set(range(11, 21))


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_a_run_without_a_trace_is_an_empty_file(client_of, store, form):
    store.add_run("young", steps=0, status="running")
    table = table_of(client_of(store).get(f"/runs/young/traces?format={form}"), form)
    assert (table.num_rows, table.column_names) == (0, ["trial", "arm", "seed", "step"])


def test_an_unknown_column_is_refused(client_of, store):
    store.add_run("r")
    assert client_of(store).get("/runs/r/traces?format=csv&metrics=nonsense").status_code == 422

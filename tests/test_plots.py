"""Pictures: every plot renders, whatever a trace went through, and spikes stay."""

import io

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from service.app import create_app
from service.plots import PLOTS
from service.settings import Settings


@pytest.fixture
def client(store):
    with TestClient(create_app(Settings(storage=str(store.folder)))) as client:
        yield client


@pytest.mark.parametrize("plot", PLOTS)
def test_every_plot_renders(store, client, plot):
    store.add_run("r", seeds=2)
    answer = client.get(f"/runs/r/{plot}.png")
    assert answer.status_code == 200
    assert Image.open(io.BytesIO(answer.content)).size == (1000, 600)


@pytest.mark.parametrize("plot", PLOTS)
def test_every_plot_survives_a_diverged_trace(store, client, plot):
    norms = np.ones(40)
    norms[30:] = np.nan
    norms[35] = np.inf
    store.add_run(
        "r", seeds=2, traces={(1, 0): {"step": np.arange(1, 41), "grad_norm": norms, "loss": norms}}
    )
    for kind, head in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        answer = client.get(f"/runs/r/{plot}.{kind}")
        assert answer.status_code == 200
        assert answer.content.startswith(head)


@pytest.mark.parametrize("plot", PLOTS)
def test_every_plot_says_when_there_is_nothing(store, client, plot):
    store.add_run("empty", steps=0, status="running")
    assert client.get(f"/runs/empty/{plot}.png").status_code == 200

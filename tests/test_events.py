"""Live runs as server-sent events: what changed, nothing twice, and an end."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from service.app import create_app
from service.settings import Settings


@contextmanager
def serving(folder, **values):
    """A real server on a free port: the events of a live run don't end, which no in-process client bears."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_app(Settings(storage=str(folder), event_seconds=0.1, log_level="error", **values))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(500):
        if server.started:
            break
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(5)


@pytest.fixture
def base(store):
    with serving(store.folder) as url:
        yield url


def events(response):
    """(event, data, id) of a stream, as they come."""
    current: dict[str, str] = {}
    for line in response.iter_lines():
        if not line:
            if "event" in current:
                yield current["event"], json.loads(current["data"]), current.get("id")
            current = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            current[name] = value


def test_a_live_run_tells_what_changes_and_ends(store, base):
    trials = store.add_run("live", status="running", steps=10, arms=2)
    with httpx.stream("GET", f"{base}/runs/live/events", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        assert next(stream)[:2] == ("data", {trials[0]: 10, trials[1]: 10})
        kind, content, _ = next(stream)
        assert (kind, len(content["trials"])) == ("progress", 2)
        store.change("live", trials={trials[1]: {"step": 20}})
        assert next(stream)[:2] == ("data", {trials[1]: 20})
        kind, content, _ = next(stream)
        assert [(trial["id"], trial["step"]) for trial in content["trials"]] == [(trials[1], 20)]
        store.change("live", {"status": "finished"}, {trial: {"status": "finished"} for trial in trials})
        rest = list(stream)
        assert [kind for kind, _, _ in rest][-1] == "end"
        assert rest[-1][1] == {"id": "live", "status": "finished"}


def test_a_client_that_comes_back_misses_nothing_and_hears_nothing_twice(store, base):
    trials = store.add_run("live", status="running", steps=10, arms=3)
    with httpx.stream("GET", f"{base}/runs/live/events", timeout=10) as response:
        *_, last = [next(stream) for stream in [events(response)] for _ in range(2)]
    store.change("live", trials={trials[2]: {"step": 33}})
    headers = {"Last-Event-ID": last[2]}
    with httpx.stream("GET", f"{base}/runs/live/events", headers=headers, timeout=10) as response:
        stream = events(response)
        assert next(stream)[:2] == ("data", {trials[2]: 33})
        assert [trial["id"] for trial in next(stream)[1]["trials"]] == [trials[2]]


def test_an_ended_run_says_so_and_then_nothing(store, base):
    store.add_run("done", arms=1)
    found = list(events(httpx.get(f"{base}/runs/done/events")))
    assert [kind for kind, _, _ in found] == ["data", "progress", "end"]
    again = httpx.get(f"{base}/runs/done/events", headers={"Last-Event-ID": found[-1][2]})
    assert again.status_code == 204


def test_a_nonsense_id_is_told_everything(store, base):
    store.add_run("done", arms=2)
    for given in ("nonsense", "digest.abc", "running.-0-", "finished.x"):
        found = list(events(httpx.get(f"{base}/runs/done/events", headers={"Last-Event-ID": given})))
        assert len(found[1][1]["trials"]) == 2


def test_many_trials_make_no_long_id(store, base):
    from service.events import identity, known_state

    rows = [{"number": number, "status": "running", "step": 99_999} for number in range(3000)]
    selection = type("Selection", (), {"run": {"status": "running"}, "trials": rows})
    state = {row["number"]: f"r{row['step']}" for row in rows}
    assert len(identity(selection, state)) < 100
    few = dict(list(state.items())[:40])
    assert known_state(identity(selection, few)) == few


def test_health_answers_while_a_client_listens(store, base):
    store.add_run("live", status="running", steps=1)
    with httpx.stream("GET", f"{base}/runs/live/events", timeout=10) as response:
        next(events(response))
        assert httpx.get(f"{base}/healthz").status_code == 200
    assert httpx.get(f"{base}/runs/unknown/events").status_code == 404


def test_health_answers_while_pictures_wait(store):
    store.add_run("r", steps=3000)

    async def scenario(base: str) -> tuple[list[int], list[float]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=base, limits=limits, timeout=60) as client:
            paths = [f"/runs/r/gradnorm.png?width={300 + number}&height=200" for number in range(200)]
            pictures = [asyncio.ensure_future(client.get(path)) for path in paths]
            waits = []
            while not all(picture.done() for picture in pictures):
                begin = time.perf_counter()
                assert (await client.get("/healthz")).status_code == 200
                waits.append(time.perf_counter() - begin)
                await asyncio.sleep(0.05)
            return [picture.result().status_code for picture in pictures], waits

    with serving(store.folder, render_queue=15) as base:
        statuses, waits = asyncio.run(scenario(base))
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 15
    assert statuses.count(503) > 100
    # Times are for the benchmark; here it must not stand in the queue of pictures.
    assert len(waits) > 5

"""Around every request: the token, headers, ids, HEAD; and errors that tell nothing."""

import json
import logging

import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.guard import COOKIE
from service.settings import Settings


@pytest.fixture
def secured(store):
    store.add_run("r", steps=5, arms=1)
    with TestClient(create_app(Settings(storage=str(store.folder), token="s3cret"))) as client:
        yield client


def test_without_the_token_only_health_answers(secured):
    assert secured.get("/healthz").status_code == 200
    for path in ("/runs", "/runs/r", "/metrics", "/readyz", "/docs", "/openapi.json", "/runs/r/gradnorm.png"):
        answer = secured.get(path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "s3cret" not in answer.text


@pytest.mark.parametrize("given", ["Bearer s3cret", "bearer s3cret"])
def test_the_token_opens(secured, given):
    assert secured.get("/runs", headers={"Authorization": given}).status_code == 200


@pytest.mark.parametrize("given", ["Bearer s3cre", "Bearer s3crets", "Bearer", "Basic s3cret", "Bearer \xfc"])
def test_another_token_does_not_open(secured, given):
    assert secured.get("/runs", headers={"Authorization": given.encode("latin-1")}).status_code == 401


def test_a_browser_trades_the_token_for_a_cookie(secured):
    answer = secured.get("/runs?limit=3&token=s3cret", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?limit=3")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "s3cret" not in cookie
    assert secured.get("/runs").status_code == 200
    secured.cookies.set(COOKIE, "s3cret")
    assert secured.get("/runs", headers={"Cookie": f"{COOKIE}=s3cret"}).status_code == 401


def test_the_trade_leads_nowhere_else(secured):
    answer = secured.get("//evil.example/?token=s3cret", follow_redirects=False)
    assert answer.headers.get("location", "/").startswith("/")
    assert not answer.headers.get("location", "/").startswith("//")


def test_every_answer_forbids_foreign_scripts(client_of, store):
    client = client_of(store)
    for path in ("/healthz", "/runs", "/nothing", "/docs"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in client.get(path, headers={"Origin": "http://x"}).headers


def test_a_request_keeps_its_id_unless_it_is_odd(client_of, store):
    client = client_of(store)
    assert client.get("/healthz", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert client.get("/healthz", headers={"X-Request-ID": "a b"}).headers["x-request-id"] != "a b"


def test_head_is_get_without_its_body(client_of, store):
    store.add_run("r", steps=5, arms=1)
    client = client_of(store)
    answer = client.head("/runs/r/gradnorm.png")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["etag"] == client.get("/runs/r/gradnorm.png").headers["etag"]


def test_other_methods_are_refused_as_a_problem(client_of, store):
    answer = client_of(store).post("/runs")
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["allow"] == "GET"


def test_an_error_inside_tells_nothing(client_of, store, caplog):
    client = client_of(store)
    context, logger = client.app.state.context, logging.getLogger("service")
    whole, context.store, logger.propagate = context.store, None, True
    try:
        with caplog.at_level("ERROR", "service"):
            answer = client.get("/runs")
    finally:
        context.store, logger.propagate = whole, False
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "NoneType" not in answer.text
    assert answer.headers["x-request-id"] in answer.json()["detail"]
    assert "content-security-policy" in answer.headers
    assert "NoneType" in caplog.text


def test_logs_are_json_lines_without_the_query(client_of, store):
    from service.logs import JsonLines

    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(JsonLines().format(record)))

    handler = Keep()
    logger = logging.getLogger("service.requests")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        client_of(store).get("/runs?study=secret-plan")
    finally:
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")
    line = lines[-1]
    assert (line["method"], line["path"], line["status"], line["route"]) == ("GET", "/runs", 200, "/runs")
    assert "secret-plan" not in json.dumps(line)


def test_metrics_count_by_route_not_by_url(client_of, store):
    client = client_of(store)
    for number in range(5):
        client.get(f"/runs/unknown-{number}")
    text = client.get("/metrics").text
    assert 'gradnorm_requests_total{method="GET",route="/runs/{id}",status="404"} 5.0' in text
    assert "unknown-3" not in text
    assert 'gradnorm_cache_misses_total{cache="pictures"}' in text

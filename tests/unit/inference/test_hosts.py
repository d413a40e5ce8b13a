"""Accepted Host headers, and answers to other hosts and to unknown paths."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from megatron.base.errors import UserError
from megatron.inference.server.hosts import AllowedHosts
from tests.unit.inference.test_connections import Running

LOOPBACK = ["localhost", "LOCALHOST:5000", "localhost.", "app.localhost:1", "127.0.0.1:5000", "127.8.9.1", "[::1]:5000"]
FOREIGN = ["evil.example", "evil.example:5000", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost"]
BROKEN = ["", " ", "localhost:5000:1", "localhost@evil.example", "[::1", "a b", "127.0.0.1/x", "evil.example#localhost"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_server_accepts_loopback_names(bound: str) -> None:
    hosts = AllowedHosts(bound)
    assert [host for host in LOOPBACK if not hosts.allows(host)] == []
    hostname = socket.gethostname() + ".example"
    assert [host for host in [*FOREIGN, *BROKEN, "10.0.0.1", "[2001:db8::1]", hostname] if hosts.allows(host)] == []


@pytest.mark.parametrize("bound", ["0.0.0.0", "10.1.2.3", "::", "node7.example"])
def test_a_public_server_accepts_addresses_and_its_own_name(bound: str) -> None:
    hosts = AllowedHosts(bound)
    named = ["10.0.0.1:5000", "[2001:db8::1]:5000", socket.gethostname(), f"{bound}:5000"] if ":" not in bound else []
    assert [host for host in [*LOOPBACK, *named] if not hosts.allows(host)] == []
    assert [host for host in [*FOREIGN, *BROKEN, "node8.example", "1.2.3.4.5"] if hosts.allows(host)] == []


def test_further_names_can_be_allowed() -> None:
    hosts = AllowedHosts("127.0.0.1", ["Models.Example.org.", "10.0.0.1", "fe80::1"])
    for host in ("models.example.org:443", "10.0.0.1", "[fe80::1]:5000", "localhost"):
        assert hosts.allows(host)
    assert not hosts.allows("example.org")
    assert not hosts.allows("10.0.0.2")
    assert AllowedHosts("127.0.0.1", ["*"]).allows("evil.example")


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:5000", "a b", "a.example/x"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"--allowed-host .* is not a host name"):
        AllowedHosts("127.0.0.1", [name])


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    server = Running(most=64)
    try:
        yield server
    finally:
        server.end()


def _ask(running: Running, method: str, path: str, host: str = "localhost") -> tuple[int, Any, Any]:
    """Status, JSON, and headers."""
    address, port = running.address
    with closing(http.client.HTTPConnection(address, port, timeout=20)) as connection:
        connection.request(method, path, headers={"Host": host, "Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        return reply.status, json.loads(text) if text else None, reply.headers


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
def test_a_foreign_name_is_refused(running: Running, path: str) -> None:
    status, answer, _ = _ask(running, "GET", path, "evil.example:5000")
    assert status == 403
    assert "--allowed-host evil.example " in answer["error"]["message"]


def test_a_given_name_reaches_the_server(running: Running) -> None:
    assert _ask(running, "GET", "/health", "models.example.org:443")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "message"),
    [
        ("GET", "/v2", 404, "unknown_url", "/v1/completions"),
        ("POST", "/v1/embeddings", 404, "unknown_url", "there is no POST /v1/embeddings here"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found", "this is tiny"),
        ("GET", "/v1/models/a/b", 404, "model_not_found", "a/b"),
        ("GET", "/v1/completions", 405, "method_not_supported", "use POST"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_supported", "use GET"),
        ("GET", "/api", 405, "method_not_supported", "there is no GET /api here"),
    ],
)  # fmt: skip
def test_unknown_paths_give_errors_in_openai_format(
    running: Running, method: str, path: str, status: int, code: str, message: str
) -> None:
    answer, body, headers = _ask(running, method, path)
    assert answer == status
    assert headers["content-type"] == "application/json"
    assert body["error"] == {**body["error"], "type": "invalid_request_error", "param": None, "code": code}
    assert message in body["error"]["message"]
    assert body["message"] == body["error"]["message"]
    assert (status == 405) == ("Allow" in headers)


def test_the_model_is_found_by_its_name(running: Running) -> None:
    status, answer, _ = _ask(running, "GET", "/v1/models/tiny")
    assert (status, answer["id"], answer["object"]) == (200, "tiny", "model")
    assert _ask(running, "GET", "/v1/models")[1]["data"] == [answer]


def test_malformed_http_is_refused(running: Running) -> None:
    assert running.ask(b"NONSENSE\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_fault_of_the_server_is_json(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(running.worker), "busy", property(lambda self: 1 / 0))
    status, answer, _ = _ask(running, "GET", "/health")
    assert (status, answer["error"]["type"]) == (500, "server_error")

"""Connections that send nothing or half a request, and other connections beside them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

pytest.importorskip("uvicorn")

from megatron.base.errors import UserError
from megatron.inference.flags import parse_flags
from megatron.inference.serve_command import ServerFlags, listen
from megatron.inference.server.app import Server
from megatron.inference.server.hosts import AllowedHosts
from megatron.inference.server.listening import Connection, HTTPServer, configuration
from megatron.inference.server.requests import RequestLimits
from megatron.inference.server.worker import Worker
from tests.unit.inference.support import trained_model

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Running:
    """Listening server in a thread of its own."""

    def __init__(self, body_s: float = 0.5, most: int = 8) -> None:
        self.listening = listen(ServerFlags(port=0))
        self.worker = Worker(trained_model(), 3, 60.0, lambda: None)
        hosts = AllowedHosts("127.0.0.1", ["models.example.org"])
        app = Server(self.worker, RequestLimits(10**7, 10**7), 1000, "tiny", hosts, body_s=body_s).app()
        self.server = HTTPServer(configuration(app, most), self.worker)
        self.worker.start()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.listening])), daemon=True)
        self.address = self.listening.getsockname()[:2]
        self.thread.start()
        _until(lambda: self.server.started)

    def open(self, data: bytes = b"", timeout: float = 20) -> socket.socket:
        """Connection that has sent ``data``."""
        opened = socket.create_connection(self.address, timeout=timeout)
        opened.sendall(data)
        return opened

    def ask(self, data: bytes) -> bytes:
        """Answer on another connection."""
        with closing(self.open(data)) as opened:
            return opened.recv(65536)

    def end(self) -> float:
        """Seconds that the end of the server takes."""
        began = time.monotonic()
        self.server.should_exit = True
        self.thread.join(20)
        self.worker.stop()
        return time.monotonic() - began


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(Connection, "HEAD_SECONDS", 1.0)
    server = Running()
    try:
        yield server
    finally:
        server.end()


@pytest.mark.parametrize(
    "sent", [b"", HEALTH[:20], HEALTH + HEALTH[:20]], ids=["nothing", "a part", "a whole and more"]
)
def test_a_connection_without_a_request_is_closed(running: Running, sent: bytes) -> None:
    # Less than the 10 s after which uvicorn closes an answered connection.
    with closing(running.open(sent, timeout=5)) as opened:
        while opened.recv(65536):
            pass


def test_trickling_does_not_keep_a_connection_open(running: Running) -> None:
    began = time.monotonic()
    with closing(running.open()) as opened, suppress(ConnectionError):
        for byte in HEALTH * 10:
            opened.sendall(bytes([byte]))
            time.sleep(0.1)
    assert time.monotonic() - began < 20  # it would take 33 s


def test_half_a_body_times_out_with_an_answer(running: Running) -> None:
    with closing(running.open(HEAD + b"{")) as opened:
        answer = b""
        while chunk := opened.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"0.5 s" in answer


@pytest.mark.slow
def test_more_connections_than_allowed_are_refused_until_others_close() -> None:
    server = Running(body_s=60.0)
    idle = [server.open(sent) for sent in [b"", HEALTH[:20], HEAD + b"{"] for _ in range(2)]
    try:
        idle.append(server.open())
        assert server.ask(HEALTH).startswith(b"HTTP/1.1 200")
        idle.append(server.open())
        _until(lambda: len(server.server.server_state.connections) == 8)
        assert server.ask(HEALTH).startswith(b"HTTP/1.1 503")
        idle.pop().close()
        _until(lambda: server.ask(HEALTH).startswith(b"HTTP/1.1 200"))
    finally:
        assert server.end() < 8.0  # half a request holds up the end for 5 s
        for connection in idle:
            connection.close()


def test_a_client_that_never_reads_is_dropped(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers fill the buffers on the way, and then its connection would stay forever."""
    monkeypatch.setattr(Connection, "WRITE_SECONDS", 0.3)
    running.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit this
    with closing(socket.socket()) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(running.address)
        deaf.settimeout(10)
        with pytest.raises(ConnectionError):
            deaf.sendall(HEALTH * 2_000_000)  # the server closed the connection before


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_address_is_refused(host: str) -> None:
    """It would mean every address of this machine."""
    with pytest.raises(UserError, match="--host: the value is empty"):
        parse_flags(["--load", "x", "--host", host], {"server": ServerFlags}, "server", "")


def test_an_invalid_address_is_one_line() -> None:
    for host in ("a..b", "x" * 70):
        with pytest.raises(UserError, match="choose others"):
            listen(ServerFlags(host=host, port=0))


def test_waiting_clients_are_answered_when_the_server_ends() -> None:
    server = Running()
    body = b'{"prompt": "1 2", "max_tokens": 1000000, "temperature": 0}'
    request = HEAD.replace(b"99", str(len(body)).encode()) + body
    opened = [server.open(request)]
    _until(lambda: b'"busy":true' in server.ask(HEALTH))
    opened.append(server.open(request))
    _until(lambda: b'"waiting":1' in server.ask(HEALTH))
    assert server.end() < 4.5
    answers = [connection.recv(65536) for connection in opened]
    assert answers[0].startswith(b"HTTP/1.1 200")
    assert answers[1].startswith(b"HTTP/1.1 503")
    assert b"the server is shutting down" in answers[1]

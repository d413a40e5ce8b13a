"""The server's command line: any answer gives a line and a status."""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tools.text_generation_cli import main


@pytest.fixture(autouse=True)
def without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the proxies of the user's environment."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """Address of a server that gives each connection the next of these answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection, connection.makefile("rb") as request:
                    # Read everything: unread bytes would reset the connection.
                    length = 0
                    while (line := request.readline().strip()) != b"":
                        name, _, value = line.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                    request.read(length)
                    connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def reply(body: str, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n{body}".encode()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 2\n3\n"), encoding="utf-8"))


@pytest.mark.parametrize(
    "url", ["localhost:abc", "http://local host:5077", "ftp://localhost", "http://", "localhost:99999", "http://[::1"]
)
def test_an_invalid_address_is_refused_before_any_request(
    url: str, typed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([url]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {url}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        reply('{"text"', length=99),
        reply("{}"),
        reply("[]"),
        reply('{"text": []}'),
        reply('{"text": [5]}'),
        reply("[" * 100_000),
        reply("\ufffd", length=1),
    ],
)
def test_a_malformed_answer_is_one_line(answer: bytes, typed: None, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answer) as url:
        assert main([url, "--tokens-to-generate", "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {url}: this is not a text generation server")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply('{"message": "too long"}', "400 Bad"), "error 400: too long"),
        (reply("Service Unavailable", "503 Busy"), "error 503: Busy"),
        (reply('{"mess', "400 Bad", length=99), "error 400: Bad"),
    ],
)
def test_refused_prompts_set_the_status(
    answer: bytes, message: str, typed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer, reply('{"text": ["3 4"]}')) as url:
        assert main([url, "--tokens-to-generate", "4"]) == 1
    out, err = capsys.readouterr()
    assert message in err
    assert "Megatron Response:\n3 4\n" in out


def test_invalid_utf8_is_not_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n1\n"), encoding="utf-8"))
    with answering(reply('{"text": ["1 2"]}')) as url:
        assert main([url, "--tokens-to-generate", "4"]) == 1
    out, err = capsys.readouterr()
    assert "is not UTF-8 text" in err
    assert "Megatron Response:\n1 2\n" in out

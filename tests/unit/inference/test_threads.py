"""The threads of the server: requests that take long leave the event loop to others."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from megatron.inference.server.app import Server
from megatron.inference.server.hosts import AllowedHosts
from megatron.inference.server.requests import RequestLimits
from megatron.inference.server.worker import Result, Ticket, Worker
from megatron.tokenizer.chat import ChatTemplate
from megatron.tokenizer.null import NullTokenizer


class RecordingTokenizer(NullTokenizer):
    """Records the threads that decode."""

    def __init__(self) -> None:
        super().__init__(96)
        self.threads: set[threading.Thread] = set()

    def detokenize(self, tokens: Any) -> str:
        self.threads.add(threading.current_thread())
        return super().detokenize(tokens)


class InstantWorker(Worker):
    """A worker whose model says nothing, at once."""

    def submit(self, ticket: Ticket) -> None:
        """Emits empty results."""
        ticket.emit([Result("", "", [], "length", []) for _ in ticket.job.prompts])


def _server(template: ChatTemplate | None = None, waiting: int = 2) -> tuple[Server, RecordingTokenizer]:
    tokenizer = RecordingTokenizer()
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    worker = InstantWorker(model, waiting, 1.0, lambda: None)
    return Server(worker, RequestLimits(64, 1000), 10_000, "m", AllowedHosts("127.0.0.1", ["*"]), template), tokenizer


async def _post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and body of an answer."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    received, statuses, content = False, list[int](), b""

    async def receive() -> dict[str, Any]:
        nonlocal received
        if received:
            await asyncio.sleep(60)
        received = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        nonlocal content
        statuses.extend([message["status"]] if "status" in message else [])
        content += message.get("body", b"")

    await server.app()(scope, receive, send)
    return statuses[0], content.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1 2", "echo": True, "logprobs": 0}),
        ("/v1/completions", {"prompt": "1 2", "echo": True, "stream": True}),
        ("/api", {"prompts": ["1 2"]}),
    ],
)
def test_answers_are_decoded_beside_the_event_loop(path: str, body: dict[str, Any]) -> None:
    server, tokenizer = _server()
    status, content = asyncio.run(_post(server, path, body))
    assert status == 200
    assert "1 2" in content
    assert tokenizer.threads
    assert threading.current_thread() not in tokenizer.threads

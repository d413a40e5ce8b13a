"""The server's threads: slow requests leave the event loop to others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
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
    """Worker whose model generates nothing, at once."""

    def submit(self, ticket: Ticket) -> None:
        """Emit empty results."""
        ticket.emit([Result("", "", [], "length", []) for _ in ticket.job.prompts])


def _server(template: ChatTemplate | None = None, queue_size: int = 2) -> tuple[Server, RecordingTokenizer]:
    tokenizer = RecordingTokenizer()
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    worker = InstantWorker(model, queue_size, 1.0, lambda: None)
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


class SlowTemplate(ChatTemplate):
    """Template rendered on release; counts concurrent renderings."""

    def __init__(self) -> None:
        super().__init__("", {})
        self.released = threading.Event()
        self.rendering = self.most = 0
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return a token, once released."""
        with self._lock:
            self.rendering += 1
            self.most = max(self.most, self.rendering)
        assert self.released.wait(20)
        with self._lock:
            self.rendering -= 1
        return "1"


def test_chats_wait_for_their_template_without_threads() -> None:
    template = SlowTemplate()
    server, _ = _server(template, queue_size=50)

    async def ask() -> tuple[list[tuple[int, str]], tuple[int, str], tuple[int, str]]:
        def chat() -> Coroutine[Any, Any, tuple[int, str]]:
            return _post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]})

        try:
            chats = [asyncio.create_task(chat()) for _ in range(51)]  # more than the pool has threads
            await asyncio.sleep(0.2)
            refused = await asyncio.wait_for(chat(), 10)
            beside = await asyncio.wait_for(_post(server, "/v1/completions", {"prompt": "1"}), 10)
        finally:
            template.released.set()
        return await asyncio.gather(*chats), refused, beside

    chats, refused, beside = asyncio.run(ask())
    assert refused[0] == 503
    error = json.loads(refused[1])["error"]
    assert (error["type"], error["message"]) == ("server_error", "50 chats are waiting; try again later")
    assert beside[0] == 200
    assert {status for status, _ in chats} == {200}
    assert template.most == 1
    assert server.worker.queued_jobs == 0


def test_a_refused_chat_lets_the_next_one_be_rendered() -> None:
    template = SlowTemplate()
    template.released.set()
    server, _ = _server(template, queue_size=1)

    async def ask() -> list[int]:
        path, messages = "/v1/chat/completions", list[Any]([[], [{"role": "user", "content": "1"}]])
        return [(await asyncio.wait_for(_post(server, path, {"messages": some}), 10))[0] for some in messages]

    assert asyncio.run(ask()) == [400, 200]

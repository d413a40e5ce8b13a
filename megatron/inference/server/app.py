"""HTTP handlers of the server: Megatron's ``PUT /api``, OpenAI's ``POST /v1/completions`` and
``/v1/chat/completions``, ``/health``, and a form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron.base.errors import UserError
from megatron.inference.jobs import InferenceJob
from megatron.inference.server.answers import ChatAnswer, CompletionAnswer, error_body, error_response, megatron_answer
from megatron.inference.server.chat import chat_job
from megatron.inference.server.hosts import AllowedHosts, HostCheck
from megatron.inference.server.requests import RequestError, RequestLimits, completion_job, megatron_job
from megatron.inference.server.worker import Event, Failure, Result, StreamedToken, Ticket, Worker
from megatron.tokenizer.chat import ChatTemplate

_ALIVE_SECONDS = 10.0
"""Interval of keep-alive comments in an idle stream."""

_LISTENING_SECONDS = 0.5
"""Interval of checking whether the client is still connected."""

_BODY_SECONDS = 30.0
"""Maximum time to receive a request's body."""

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class JobHandle:
    """A submitted job, as seen by its request."""

    def __init__(self, worker: Worker, job: InferenceJob) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server is shutting down
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self.ticket = Ticket(job, emit)
        worker.submit(self.ticket)

    def cancel(self) -> None:
        """Cancel the job."""
        self.ticket.canceled.set()

    async def next(self, seconds: float) -> Event | None:
        """Next event; None after ``seconds`` without an event."""
        try:
            return await asyncio.wait_for(self._events.get(), seconds)
        except asyncio.TimeoutError:
            return None

    async def results(self, request: Request) -> list[Result]:
        """Wait for the results; cancel the job if the client disconnects.

        Raises:
            RequestError: when the job failed.
            ClientDisconnect: when the client has disconnected.
        """
        last_check = time.monotonic()
        while True:
            event = await self.next(_LISTENING_SECONDS)
            if isinstance(event, Failure):
                raise RequestError(event.message, event.status)
            if isinstance(event, list):
                return event
            if time.monotonic() - last_check >= _LISTENING_SECONDS:
                last_check = time.monotonic()
                if await request.is_disconnected():
                    self.cancel()
                    raise ClientDisconnect


class Server:
    """Handlers of the HTTP server.

    Args:
        worker: worker that runs the jobs.
        limits: limits per request.
        body_bytes: maximum size of a request's body in bytes.
        name: name of the model.
        hosts: names of the server.
        template: chat template; None if the tokenizer has none.
        body_s: maximum time in seconds to receive a body.
    """

    def __init__(
        self,
        worker: Worker,
        limits: RequestLimits,
        body_bytes: int,
        name: str,
        hosts: AllowedHosts,
        template: ChatTemplate | None = None,
        body_s: float = _BODY_SECONDS,
    ) -> None:
        self.worker = worker
        self.limits = limits
        self.body_bytes = body_bytes
        self.body_s = body_s
        self.name = name
        self.hosts = hosts
        self.template = template
        self.started = time.time()
        self._rendering = asyncio.Lock()
        self._waiting_chats = 0

    def app(self) -> Starlette:
        """Build the application."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/api", self.megatron, methods=["PUT", "POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model_by_name),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        handlers: Any = {
            UserError: _respond_refused,
            ClientDisconnect: _respond_disconnected,
            HTTPException: _respond_unrouted,
            Exception: _respond_failed,
        }
        checks = [Middleware(HostCheck, hosts=self.hosts)]
        return Starlette(routes=routes, middleware=checks, exception_handlers=handlers)

    async def page(self, request: Request) -> Response:
        """Return the form."""
        return HTMLResponse(files(__package__).joinpath("page.html").read_text(encoding="utf-8"), headers=_SECURITY)

    async def health(self, request: Request) -> Response:
        """Return the state of the server and its queue."""
        worker = self.worker
        return JSONResponse(
            {
                "status": "ok",
                "model": self.name,
                "window": self.limits.window,
                "busy": worker.busy,
                "waiting": worker.queued_jobs,
                "served": worker.served,
                "uptime_s": round(time.time() - self.started, 1),
            }
        )

    async def models(self, request: Request) -> Response:
        """List the single model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model_by_name(self, request: Request) -> Response:
        """Return a model by its name."""
        model_name = request.path_params["model"]
        if model_name != self.name:
            return error_response(f"there is no model {model_name} here; this is {self.name}", 404, "model_not_found")
        return JSONResponse(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": int(self.started), "owned_by": "megatron-cc"}

    async def _body(self, request: Request) -> object:
        """Read the request body as JSON.

        Raises:
            RequestError: when the body is not JSON, is too long, or arrives too slowly.
        """
        # Pages of other origins cannot send this type without a CORS preflight, so they cannot use the server.
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise RequestError("the request must have Content-Type: application/json", 415)
        try:
            body = await asyncio.wait_for(self._read(request), self.body_s)
        except asyncio.TimeoutError as error:
            raise RequestError(f"the request did not arrive completely within {self.body_s:g} s", 408) from error
        self.worker.check_room()  # before parsing a request that the full queue would reject
        try:
            parsed_body = json.loads(body)
            json.dumps(parsed_body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestError("the request contains half a character (an escaped surrogate)") from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the request is not valid JSON: {error}") from error
        return parsed_body

    async def _read(self, request: Request) -> bytes:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.body_bytes:
                raise RequestError(f"the request is longer than {self.body_bytes} bytes", 413)
        return body

    async def megatron(self, request: Request) -> Response:
        """Handle ``PUT /api``."""
        body, tokenizer = await self._body(request), self.worker.model.tokenizer
        job = await run_in_threadpool(megatron_job, body, tokenizer, self.limits)
        results = await JobHandle(self.worker, job).results(request)
        return await run_in_threadpool(lambda: JSONResponse(megatron_answer(job, results, tokenizer)))

    async def completions(self, request: Request) -> Response:
        """Handle ``POST /v1/completions``."""
        body, tokenizer = await self._body(request), self.worker.model.tokenizer

        def parse() -> CompletionAnswer:
            return CompletionAnswer(completion_job(body, tokenizer, self.limits), self.name, tokenizer)

        return await self._answer(request, await run_in_threadpool(parse))

    async def chat(self, request: Request) -> Response:
        """Handle ``POST /v1/chat/completions``."""
        body, tokenizer = await self._body(request), self.worker.model.tokenizer

        def parse() -> ChatAnswer:
            return ChatAnswer(chat_job(body, self.template, tokenizer, self.limits), self.name, tokenizer)

        # Render one chat at a time: each starts a process, and waiting requests must not occupy threads.
        if self._waiting_chats >= self.worker.max_queue:
            raise RequestError(f"{self._waiting_chats} chats are waiting; try again later", 503)
        self._waiting_chats += 1
        try:
            await self._rendering.acquire()
        finally:
            self._waiting_chats -= 1
        try:
            answer = await run_in_threadpool(parse)
        finally:
            self._rendering.release()
        return await self._answer(request, answer)

    async def _answer(self, request: Request, answer: CompletionAnswer) -> Response:
        handle = JobHandle(self.worker, answer.job)
        if answer.completion.stream:
            return StreamingResponse(
                _events(handle, answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        results = await handle.results(request)
        return await run_in_threadpool(lambda: JSONResponse(answer.full_response(results)))


async def _events(handle: JobHandle, answer: CompletionAnswer) -> AsyncIterator[str]:
    """Stream a completion as server-sent events."""
    try:
        for first in await run_in_threadpool(lambda: [_event(event) for event in answer.first_events()]):
            yield first
        while True:
            event = await handle.next(_ALIVE_SECONDS)
            if event is None:
                yield ": waiting\n\n"
            elif isinstance(event, Failure):
                yield _event(error_body(event.message, event.status))
                return
            elif isinstance(event, StreamedToken):
                yield _event(answer.token_event(event))
            else:
                for last in answer.last_events(event):
                    yield _event(last)
                yield "data: [DONE]\n\n"
                return
    finally:
        handle.cancel()


def _event(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _respond_refused(request: Request, error: UserError) -> Response:
    return error_response(str(error), error.status if isinstance(error, RequestError) else 400)


async def _respond_unrouted(request: Request, error: HTTPException) -> Response:
    """Respond to a request with an unknown path or method."""
    endpoint, status = f"{request.method} {request.url.path}", error.status_code
    if status == 404:
        paths = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
        return error_response(f"there is no {endpoint} here; there are {paths}", 404, "unknown_url")
    if status == 405:
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        return error_response(
            f"there is no {endpoint} here; use {' or '.join(allowed)}", 405, "method_not_supported", error.headers
        )
    return error_response(error.detail, status, headers=error.headers)


async def _respond_failed(request: Request, error: Exception) -> Response:
    return error_response(f"the server failed: {type(error).__name__}", 500)


async def _respond_disconnected(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)

"""Time limits of the HTTP server's connections, and its orderly shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.inference.server.worker import Worker

BACKLOG = 2048
"""Connections that the kernel may queue before the server accepts them."""

_CUT_SECONDS = 3.0
"""Time for the current job to stop early at shutdown; after that its client gets an error instead."""


class Connection(H11Protocol):
    """HTTP connection that is closed if its client is too slow.

    uvicorn limits neither the time to send a request's head nor the time to read a response. Handlers limit the time to
    receive a body.
    """

    HEAD_SECONDS = 20.0
    """Time from the connection, or the last response, to the end of a request's head; exceeds uvicorn's keep-alive."""

    WRITE_SECONDS = 60.0
    """Time in which a client must read some of its response when the write buffer is full."""

    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        self._deadline.cancel()
        self._expect_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(self.HEAD_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class HTTPServer(uvicorn.Server):
    """uvicorn server that answers every pending request at shutdown.

    Args:
        config: configuration from ``configuration``.
        worker: worker that runs the jobs; it stops with the server.
        on_startup: called when the server listens.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, on_startup: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self.worker = worker
        self._on_startup = on_startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.stop_jobs()
        asyncio.get_running_loop().call_later(_CUT_SECONDS, self.worker.fail_current_job)
        await super().shutdown(sockets)


def configuration(app: Starlette, max_connections: int) -> uvicorn.Config:
    """uvicorn's configuration; requests on more than ``max_connections`` connections get status 503."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="error",
        access_log=False,
        backlog=BACKLOG,
        limit_concurrency=max_connections + 1,  # this many connections already exceed uvicorn's limit
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
    )

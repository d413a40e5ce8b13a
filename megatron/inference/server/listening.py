"""Connections: how many there may be, how long one may be silent, and how they end with the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.inference.server.worker import Worker

_CUT_SECONDS = 3.0
"""How long the job at hand may take to be cut short before its client is told so instead."""


class Connection(H11Protocol):
    """A connection that is closed where it keeps others out without asking anything.

    uvicorn limits neither the time before a first request nor that of half a request, while it counts both against
    the connections that there may be: here whoever has sent no whole request in time is closed, and the one that
    has been silent longest gives way where there are too many. What happens to a body that comes slowly, while its
    handler waits for it, is the handler's to say.
    """

    HEAD_SECONDS = 20.0
    """From the beginning, or the answer before, to the end of a request's head; longer than uvicorn keeps alive."""

    WRITE_SECONDS = 60.0
    """In which a client must have read some of its answer where much of it waits."""

    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        others = [one for one in cast("set[Connection]", self.connections) if not one.transport.is_closing()]
        silent = [one for one in others if one is not self and one.silent]
        if silent and 2 * len(others) > (self.limit_concurrency or 0):
            min(silent, key=lambda one: one._since)._drop()

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

    def on_response_complete(self) -> None:
        self._deadline.cancel()
        self._expect()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Lets those that wait for an answer have it."""
        if self.silent:
            self.transport.close()
        else:
            super().shutdown()

    @property
    def silent(self) -> bool:
        """Whether no whole request waits for an answer."""
        return self._idle or (self.cycle.more_body and not self.cycle.response_started)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect(self) -> None:
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(self.HEAD_SECONDS, self._late)

    def _late(self) -> None:
        if self._idle:
            self._drop()

    def _drop(self) -> None:
        """Closes it; what its client has not read would keep it open."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


class HTTPServer(uvicorn.Server):
    """Ends without leaving anybody unanswered.

    Args:
        config: what ``configuration`` made.
        worker: does the jobs; it is told to end when the server does.
        listens: called when it does.
    """

    def __init__(self, config: uvicorn.Config, worker: Worker, listens: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self.worker = worker
        self._listens = listens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.cut()
        asyncio.get_running_loop().call_later(_CUT_SECONDS, self.worker.give_up)
        await super().shutdown(sockets)


def configuration(app: Starlette, most: int) -> uvicorn.Config:
    """uvicorn's, for so many connections, or twice as many where each has asked something."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        limit_concurrency=2 * most,  # refused with status 503; more than most are closed while they are silent
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
    )

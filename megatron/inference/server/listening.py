"""Connection limits of the HTTP server: their number, idle time, and orderly shutdown."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from typing import cast

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from megatron.inference.server.answers import error_body, error_headers
from megatron.inference.server.worker import Worker

BACKLOG = 2048
"""Connections that the kernel may queue before the server accepts them."""

_CUT_SECONDS = 3.0
"""Time for the current job to stop early at shutdown; after that its client gets an error instead."""

_OWN_FILES = 128
"""Open files besides the connections: libraries, the checkpoint, the sockets between ranks."""


class Connection(H11Protocol):
    """HTTP connection with limits on its idle time and on the number of connections.

    uvicorn limits neither the time before the first request nor the time to send a request head. This class closes a
    connection that sends no complete head in time. At the maximum number of connections, a new client replaces the
    connection that has been idle longest; if none is idle, the new client is told to try again later. Handlers limit
    the time to receive a body.
    """

    MOST = 512
    """Maximum number of served connections; as many again may be reading a rejection."""

    HEAD_SECONDS = 20.0
    """Time from the connection, or the last response, to the end of a request's head; exceeds uvicorn's keep-alive."""

    SPEAK_SECONDS = 2.0
    """Idle time after which another client may replace a connection: when many clients connect at once, most send their
    requests a moment later."""

    WRITE_SECONDS = 60.0
    """Time in which a client must read some of its response when the write buffer is full."""

    READ_SECONDS = 3.0
    """Time for a rejected client to read the reason."""

    _stuck: asyncio.TimerHandle | None = None
    _turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        other_connections = [peer for peer in cast("set[Connection]", self.connections) if peer is not self]
        served_connections = [
            peer for peer in other_connections if not (peer._turned_away or peer.transport.is_closing())
        ]
        if len(other_connections) >= 2 * self.MOST:
            # Abort the connection that was rejected first: it has had most time to read the reason.
            rejected = [peer for peer in other_connections if peer._turned_away and not peer.transport.is_closing()]
            (min(rejected, key=lambda peer: peer._since) if rejected else self).transport.abort()
        if len(served_connections) >= self.MOST:
            idle_connections = [
                peer
                for peer in served_connections
                if peer.silent and self.loop.time() - peer._since >= self.SPEAK_SECONDS
            ]
            dropped_connection = min(idle_connections, key=lambda peer: peer._since) if idle_connections else self
            dropped_connection._turn_away(503, f"{self.MOST} others are connected; try again later")

    def data_received(self, data: bytes) -> None:
        if not self._turned_away:
            super().data_received(data)

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

    def send_400_response(self, msg: str) -> None:
        """Reject a request that is not HTTP."""
        self._turn_away(400, f"the request is no HTTP: {msg}")

    def shutdown(self) -> None:
        """Close the connection, after its pending response."""
        if self._turned_away or self.silent:
            self.transport.close()
        else:
            super().shutdown()

    @property
    def silent(self) -> bool:
        """Whether no complete request is waiting for a response."""
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
        """Close the connection, discarding unsent data, which would keep it open."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _turn_away(self, status: int, message: str) -> None:
        """Send an error and close the connection.

        Closing with unread input would reset the connection, and the client would lose the error. Input is therefore
        read and discarded until the client closes, for ``READ_SECONDS``.
        """
        if self.transport.is_closing():
            return
        answerable = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        no_body = not self._idle and self.scope["method"] == "HEAD"
        if not answerable or self.transport.get_write_buffer_size() or no_body:
            self._drop()
            return
        self._turned_away, self._since = True, self.loop.time()
        self._deadline.cancel()
        self._unset_keepalive_if_required()
        if not self._idle:
            self.cycle.disconnected = True  # its handler stops waiting
            self.cycle.message_event.set()
        body = json.dumps(error_body(message, status)).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        head = h11.Response(
            status_code=status, headers=list({**fields, **error_headers(status)}.items()), reason=STATUS_PHRASES[status]
        )
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(self.READ_SECONDS, self.transport.abort)


class HTTPServer(uvicorn.Server):
    """uvicorn server that answers every pending request at shutdown.

    Args:
        config: configuration, as ``configuration`` makes it.
        worker: worker that runs the jobs; it stops with the server.
        listens: called when the server listens.
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


def room_for(most: int) -> int:
    """Number of connections that can be served: ``most``, or fewer if the limit of open files is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = 2 * most + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < required_files:
        soft = required_files if hard == resource.RLIM_INFINITY else min(required_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, (soft - _OWN_FILES) // 2))


def configuration(app: Starlette, most: int) -> uvicorn.Config:
    """uvicorn's configuration for at most ``most`` connections."""

    class Bounded(Connection):
        MOST = most

    return uvicorn.Config(
        app,
        http=Bounded,
        ws="none",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
    )

"""Clients of a store that do not read, or read slowly."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from megatron.diloco import store_readers as readers

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="nothing is watched without Linux's /proc")
_ROOM = 1 << 16


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection; the server has more to send than the client can buffer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.sendall(bytes(64 * _ROOM))
            yield server, client


def _is_open(server: socket.socket) -> bool:
    """Whether the connection is open, even if its buffers are full."""
    try:
        server.send(b"more")
    except TimeoutError:
        return True
    except BrokenPipeError:
        return False
    return True


def _read(client: socket.socket, stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        with suppress(OSError):  # the test is over
            client.recv(_ROOM // 2)


@pytest.mark.parametrize("pause", [0.15, None])
def test_only_clients_that_do_not_read_are_disconnected(pause: float | None) -> None:
    stop = threading.Event()
    with _connection() as (server, client):
        if pause is not None:
            threading.Thread(target=_read, args=(client, stop, pause), daemon=True).start()
        readers._disconnect_idle_clients(server.getsockname()[1])
        assert readers._unsent_bytes(server) > 0 or pause is None
        assert _is_open(server) == (pause is not None)
        stop.set()


@pytest.mark.parametrize("round_trip", [0.3, 0.001])
def test_distant_clients_have_the_time_of_several_round_trips(
    round_trip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_round_trip_seconds", lambda connection: round_trip)
    with _connection() as (server, client):
        timer = threading.Timer(0.8, client.recv, (_ROOM,))
        timer.start()
        began = time.monotonic()
        readers._disconnect_idle_clients(server.getsockname()[1])
        assert time.monotonic() - began < 1.2
        assert _is_open(server) == (round_trip > 0.1)
        timer.join()


def test_acknowledged_bytes_and_round_trips_come_from_the_kernel() -> None:
    with _connection() as (server, client):
        before = readers._acknowledged_bytes(server)
        received = len(client.recv(_ROOM, socket.MSG_WAITALL))
        time.sleep(0.3)
        assert 0 < received <= before
        assert before <= readers._acknowledged_bytes(server) <= before + received + _ROOM
        assert 0 < readers._round_trip_seconds(server) < 0.2
    assert readers._acknowledged_bytes(server) == 0

"""Clients of a store that do not read, and those that only read slowly."""

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
    """The two ends of a connection; the first one has more to send than the second one has room for."""
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
    """Whether more may be sent, though there may be no room for it."""
    try:
        server.send(b"more")
    except TimeoutError:
        return True
    except BrokenPipeError:
        return False
    return True


def _read(client: socket.socket, ended: threading.Event, pause: float) -> None:
    while not ended.wait(pause):
        with suppress(OSError):  # the test is over
            client.recv(_ROOM // 2)


@pytest.mark.parametrize("pause", [0.15, None])
def test_who_reads_slowly_is_not_cut_off_and_who_reads_nothing_is(pause: float | None) -> None:
    """All the time something is left to be sent, to both of them."""
    ended = threading.Event()
    with _connection() as (server, client):
        if pause is not None:
            threading.Thread(target=_read, args=(client, ended, pause), daemon=True).start()
        readers._cut_off(server.getsockname()[1])
        assert readers._unsent_bytes(server) > 0 or pause is None
        assert _is_open(server) == (pause is not None)
        ended.set()


@pytest.mark.parametrize("round_trip", [0.3, 0.001])
def test_who_is_far_away_has_the_time_of_several_round_trips(
    round_trip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_round_trip_seconds", lambda connection: round_trip)
    with _connection() as (server, client):
        timer = threading.Timer(0.8, client.recv, (_ROOM,))
        timer.start()
        began = time.monotonic()
        readers._cut_off(server.getsockname()[1])
        assert time.monotonic() - began < 1.2
        assert _is_open(server) == (round_trip > 0.1)
        timer.join()


def test_the_kernel_says_how_much_was_taken_and_how_far_away_a_client_is() -> None:
    with _connection() as (server, client):
        before = readers._acknowledged_bytes(server)
        taken = len(client.recv(_ROOM, socket.MSG_WAITALL))
        time.sleep(0.3)
        assert 0 < taken <= before
        assert before <= readers._acknowledged_bytes(server) <= before + taken + _ROOM
        assert 0 < readers._round_trip_seconds(server) < 0.2
    assert readers._acknowledged_bytes(server) == 0

"""A bound on a store's memory for clients that do not read its answers."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

import torch.distributed as dist

from megatron.base.memory import return_freed_memory

_TICK_SECONDS = 0.05
_MIN_PATIENCE = 0.5
"""Seconds in which a nearby client must read something."""
_ROUND_TRIPS = 4
"""Round trips in which a more distant client must read something."""
_INFO_BYTES = 128
_MAX_GROWTH = 64 << 20
"""Growth of this process in bytes at which the store's clients are examined."""


def watch_readers(store: dist.TCPStore) -> None:
    """Watch for a store's lifetime whether answers pile up in it, and disconnect clients that do not read them.

    torch's store buffers unsent answers without limit. On systems without /proc nothing is watched.

    Args:
        store: a store that this process serves.
    """
    threading.Thread(target=_watch, args=(weakref.ref(store), store.port), name="readers", daemon=True).start()


def _watch(store: weakref.ref[dist.TCPStore], port: int) -> None:
    with suppress(OSError):
        lowest = _resident_bytes()
        while store() is not None:
            time.sleep(_TICK_SECONDS)
            lowest = min(lowest, _resident_bytes())
            if _resident_bytes() - lowest > _MAX_GROWTH and not _disconnect_idle_clients(port):
                # Otherwise the answers to each disconnected client would add to the memory of this process.
                return_freed_memory()
                lowest = _resident_bytes()


def _resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _disconnect_idle_clients(port: int) -> int:
    """End the connections at a port with clients that read nothing during the observation; return their number."""
    disconnected = 0
    with ExitStack() as stack:
        acknowledged = {
            connection: _acknowledged_bytes(connection) for connection in map(stack.enter_context, _connections(port))
        }
        began = time.monotonic()
        while acknowledged:
            time.sleep(_TICK_SECONDS)
            elapsed = time.monotonic() - began
            for connection, before in list(acknowledged.items()):
                if not _unsent_bytes(connection) or _acknowledged_bytes(connection) != before:
                    del acknowledged[connection]
                elif elapsed > max(_MIN_PATIENCE, _ROUND_TRIPS * _round_trip_seconds(connection)):
                    del acknowledged[connection]
                    disconnected += 1
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
    return disconnected


def _connections(port: int) -> list[socket.socket]:
    """This process's connections at a local port, as copies."""
    connections = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            try:
                local_address, _ = connection.getsockname()[:2], connection.getpeername()
            except (OSError, ValueError):
                local_address = ()
            if len(local_address) == 2 and local_address[1] == port:
                connections.append(connection)
            else:
                connection.close()
    return connections


def _unsent_bytes(connection: socket.socket) -> int:
    """Bytes not taken by a connection's other end."""
    with suppress(OSError):
        return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])
    return 0


def _acknowledged_bytes(connection: socket.socket) -> int:
    """Bytes taken by a connection's other end since its beginning."""
    return int(struct.unpack_from("Q", _tcp_info(connection), 120)[0])  # tcpi_bytes_acked of linux/tcp.h


def _round_trip_seconds(connection: socket.socket) -> float:
    """Typical upper bound on the response time of a connection's other end."""
    mean, deviation = struct.unpack_from("2I", _tcp_info(connection), 68)  # tcpi_rtt and tcpi_rttvar, in microseconds
    return float(mean + 4 * deviation) / 1e6  # like TCP's retransmission timeout


def _tcp_info(connection: socket.socket) -> bytes:
    """The kernel's TCP information of a connection; zeros if it has none."""
    with suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
    return bytes(_INFO_BYTES)

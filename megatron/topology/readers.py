"""Bounds what a store keeps for clients that ask and do not read the answers."""

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

_TICK_SECONDS = 0.05
_LOOKS = 3
_MOST_GROWTH = 64 << 20
"""Bytes by which this process may grow before the store's clients are looked at."""


def watch_readers(store: dist.TCPStore) -> None:
    """Watches, for as long as a store lives, whether answers pile up in it: those who do not read them are cut off.

    torch's store keeps all that it has to send, however much that is. On systems without /proc nothing is watched.

    Args:
        store: a store that this process serves.
    """
    threading.Thread(target=_watch, args=(weakref.ref(store), store.port), name="readers", daemon=True).start()


def _watch(store: weakref.ref[dist.TCPStore], port: int) -> None:
    with suppress(OSError):
        least = _resident_bytes()
        while store() is not None:
            time.sleep(_TICK_SECONDS)
            least = min(least, _resident_bytes())
            if _resident_bytes() - least > _MOST_GROWTH:
                _cut_off(port)
                least = _resident_bytes()


def _resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cut_off(port: int) -> None:
    """Ends the connections at a port whose clients read nothing while they are looked at."""
    with ExitStack() as stack:
        stuck = [stack.enter_context(one) for one in _connections(port)]
        for _ in range(_LOOKS):
            stuck = [one for one in stuck if _unsent_bytes(one)]
            time.sleep(_TICK_SECONDS)
        for one in stuck:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _connections(port: int) -> list[socket.socket]:
    """This process's connections at a port of its own, as copies."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            try:
                own, _ = one.getsockname()[:2], one.getpeername()
            except (OSError, ValueError):
                own = ()
            if len(own) == 2 and own[1] == port:
                found.append(one)
            else:
                one.close()
    return found


def _unsent_bytes(one: socket.socket) -> int:
    """Bytes that a connection's other end has not taken."""
    with suppress(OSError):
        return int(struct.unpack("i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))[0])
    return 0

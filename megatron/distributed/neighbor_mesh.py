"""A mesh of TCP connections for exchanging lines of text between neighboring ranks, without a master.

Each rank keeps connections to the ranks at distances 1, 2, 4, ... on a ring, both ways: 23 of them in a world of 4,096.
A message passed on from neighbor to neighbor reaches every rank in a few steps, whichever ranks are gone.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron.base.addresses import is_loopback
from megatron.distributed.store import own_address

CONNECT_SECONDS = 10.0
LONGEST_LINE = 2000
"""Maximum length in bytes; a connection that sends a longer line is not from a rank."""
_ACCEPT_PAUSE_SECONDS = 0.1
MAX_STRANGERS = 64
"""Maximum number of unidentified connections; more than a rank has neighbors at any world size."""


def neighbors(rank: int, world_size: int) -> list[int]:
    """The ranks to which a rank keeps connections; the relation is mutual."""
    ranks = set()
    distance = 1
    while distance < world_size:
        ranks |= {(rank + distance) % world_size, (rank - distance) % world_size}
        distance *= 2
    return sorted(ranks - {rank})


@dataclass
class Peer:
    """A neighbor and its connection.

    Attributes:
        rank, host: the neighbor's rank and machine.
        link: the connection.
        lines: unread lines; an empty line is a heartbeat.
        closed: whether the connection has ended.
    """

    rank: int
    host: str
    link: socket.socket
    lines: list[str] = field(default_factory=list)
    closed: bool = False
    _received_bytes: bytes = b""
    _unsent_bytes: bytes = b""

    def tell(self, line: str) -> None:
        """Send a line, now or, if the send buffer is full, with a later line."""
        if line or not self._unsent_bytes:  # heartbeats need not queue up
            self._unsent_bytes += f"{line}\n".encode()
        if not self.closed:
            try:
                self._unsent_bytes = self._unsent_bytes[self.link.send(self._unsent_bytes) :]
            except BlockingIOError:
                pass  # the peer does not read: a later line will try again
            except OSError:
                self._unsent_bytes = b""  # the connection has ended; reading finds that out, after the last lines

    def read_lines(self) -> None:
        """Read available data without waiting."""
        try:
            data = self.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._received_bytes = (self._received_bytes + data).split(b"\n")
        self.lines += [line.decode(errors="replace") for line in lines]
        self.closed = not data or len(self._received_bytes) > LONGEST_LINE


class Mesh:
    """This rank's listening socket and its connections.

    A single thread waits and reads. Other threads may call ``tell`` and ``wake``, one at a time.

    Args:
        rank, world_size: this rank's number and the number of ranks.
        master: the host name or address of the rendezvous; it determines which of this machine's addresses to use.
        host: this machine's name in messages.
        local: whether all ranks are on this machine.
    """

    def __init__(self, rank: int, world_size: int, master: str, host: str, local: bool = False) -> None:
        self.rank = rank
        self.neighbors = neighbors(rank, world_size)
        self.peers: dict[int, Peer] = {}
        self._host = host
        self._hosts: dict[int, str] = {}
        self._token = secrets.token_hex(16)
        self._strangers: dict[socket.socket, Peer] = {}
        family, address = own_address("localhost" if local else master)
        # A machine's name may resolve to a loopback address on the machine itself, and to another address elsewhere.
        ambiguous = is_loopback(address) and not (local or is_loopback(master))
        self._address = master if ambiguous else address
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(("" if ambiguous else address, 0))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def connect(self, store: dist.Store) -> list[str]:
        """Publish this rank's address in the store, and connect to neighbors of lower rank; the others connect here.

        Returns:
            A line for each neighbor that cannot be reached.

        Raises:
            RuntimeError: when the store fails, or a neighbor does not publish its address within the store's timeout.
        """
        port = self._listener.getsockname()[1]
        local_contact = {"address": self._address, "port": port, "token": self._token, "host": self._host}
        store.set(f"neighbor/{self.rank}", json.dumps(local_contact))
        problems = []
        for rank in self.neighbors:
            contact: dict[str, Any] = json.loads(store.get(f"neighbor/{rank}"))
            self._hosts[rank] = contact["host"]
            if rank < self.rank:
                try:
                    link = socket.create_connection((contact["address"], contact["port"]), CONNECT_SECONDS)
                except OSError as error:
                    address = f"{contact['address']}:{contact['port']}"
                    problems.append(f"rank {rank} on {contact['host']} cannot be reached at {address}: {error}")
                    continue
                peer = self._add_peer(rank, link)
                peer.tell(f"{self.rank} {contact['token']}")
        return problems

    def _add_peer(self, rank: int, link: socket.socket) -> Peer:
        link.setblocking(False)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(rank, self._hosts[rank], link)
        self.peers[rank] = peer
        self._selector.register(link, selectors.EVENT_READ, peer)
        return peer

    def wait_for_data(self, seconds: float) -> None:
        """Read until data has come, ``wake`` is called, or the time is over."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(64)
            elif isinstance(key.data, Peer):
                key.data.read_lines()
                if key.data.closed:
                    self._close_link(key.data.link)
            elif isinstance(key.fileobj, socket.socket):
                self._identify(key.fileobj)

    def wake(self) -> None:
        """End ``wait_for_data`` in another thread."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            time.sleep(_ACCEPT_PAUSE_SECONDS)  # too many open files: the caller stays in the queue, and select returns
            return
        link.setblocking(False)
        if len(self._strangers) == MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._close_link(oldest)
        self._strangers[link] = Peer(-1, "", link)
        self._selector.register(link, selectors.EVENT_READ)

    def _identify(self, link: socket.socket) -> None:
        """Register an accepted connection as a neighbor's, once it has sent its rank and this listener's token."""
        stranger = self._strangers.get(link)
        if stranger is None:  # evicted for a newer connection by the same wait
            return
        stranger.read_lines()
        if stranger.lines:
            name, _, token = stranger.lines.pop(0).partition(" ")
            rank = int(name) if name.isdecimal() and len(name) < 10 else -1
            if secrets.compare_digest(token.encode(), self._token.encode()) and rank in self._hosts:
                self._selector.unregister(link)
                del self._strangers[link]
                peer = self._add_peer(rank, link)
                peer.lines, peer.closed = stranger.lines, stranger.closed
                peer._received_bytes = stranger._received_bytes
                if peer.closed:
                    self._close_link(link)
                return
            stranger.closed = True
        if stranger.closed:
            del self._strangers[link]
            self._close_link(link)

    def _close_link(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        link.close()

    def tell(self, line: str) -> None:
        """Send a line to all neighbors."""
        for peer in list(self.peers.values()):
            peer.tell(line)

    def close(self) -> None:
        """Close all connections; earlier lines still arrive."""
        for peer in self.peers.values():
            if not peer.closed:
                with suppress(OSError):
                    peer.link.shutdown(socket.SHUT_WR)
                peer.read_lines()  # closing a connection with unread data resets it, which may overtake the last lines
                peer.link.close()
        for link in [*self._strangers, self._listener, self._waker, self._woken]:
            link.close()
        self._selector.close()

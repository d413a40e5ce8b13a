"""The rendezvous store of islands: served by a process that does not train, and that outlives every island."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.base.addresses import write_address
from megatron.base.errors import first_line
from megatron.diloco.store_readers import watch_readers
from megatron.distributed.errors import CommunicationError
from megatron.distributed.store import OWN_INTERFACE, connect_store, loopback_interface, serve_store
from megatron.distributed.work import Caller

POLL_SECONDS = 0.02
HEARTBEAT_SECONDS = 0.5
SILENT_SECONDS = 10.0
"""Time without a heartbeat after which the others no longer wait for an island."""
_ANSWER_SECONDS = 60.0
"""Longest time to wait for an answer of a store."""
_THREAD_SECONDS = 2.0
"""Time to join the heartbeat thread, which may hang on a store that does not answer."""
_GENERATION, _ALIVE = "generation", "alive"
_PREFIX = "megatron-islands"

T = TypeVar("T")


def serve(host: str, port: int) -> dist.TCPStore:
    """Serve a store at a single address of this machine; port 0 takes a free port.

    Raises:
        CommunicationError: when the address cannot be used.
    """
    try:
        store = serve_store(host, port, seconds=30.0)
    except (OSError, RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"the islands' meeting place cannot be at {write_address(host, port)}: {first_line(error)}"
        ) from error
    watch_readers(store)
    return store


def note_end(store: dist.Store, island: int, has_ended: bool = True) -> None:
    """Record an island's end for the process that serves the store; see ``IslandStore.note_end``."""
    dist.PrefixStore(_PREFIX, store).set(_end_key(island), "1" if has_ended else "")


def _end_key(island: int) -> str:
    """Key of whether an island's launcher has ended, in all generations."""
    return f"ended/{island}"


class IslandStore:
    """A process's view of the store.

    A generation lasts from a common start of islands to the end of the last of them. An island that arrives later joins
    the generation; if no island is left, the next start begins another.

    Args:
        host, port: address of the store.
        seconds: longest time until the store answers.
        tell: prints a line.

    Raises:
        CommunicationError: when nothing answers there.
    """

    def __init__(self, host: str, port: int, seconds: float, tell: Callable[[str], None] = lambda line: None) -> None:
        self.address, self._address = write_address(host, port), (host, port)
        self._seconds = min(seconds, _ANSWER_SECONDS)
        self._caller = Caller("meeting place")

        notice = f"waiting for the islands' meeting place at {self.address}, {seconds:g} s at most"
        try:
            self._tcp = connect_store(host, port, seconds, lambda: tell(notice))
        except TimeoutError as error:
            raise CommunicationError(
                f"what listens at {self.address} (--islands-address) has not answered as a meeting place of islands "
                f"does within {seconds:g} s: another service, or a launcher that hangs?"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise CommunicationError(
                f"no meeting place of islands answers at {self.address} (--islands-address): {first_line(error)}"
            ) from error
        self.root = dist.PrefixStore(_PREFIX, self._tcp)
        self.generation = 0
        self.box: dist.Store = self.root
        self._stop_event = threading.Event()
        self._heartbeats: threading.Thread | None = None

    def own_address(self) -> str | None:
        """This machine's address towards the store, at which others reach this process.

        None if the store is served at every address, or if the user has chosen an interface. The loopback interface
        does not count as chosen: only the ranks of a machine listen there for each other.
        """
        own_interfaces = (None, "", loopback_interface(), os.environ.get(OWN_INTERFACE))
        if os.environ.get("GLOO_SOCKET_IFNAME") not in own_interfaces:
            return None
        family, *_, address = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)[0]
        if ipaddress.ip_address(address[0]).is_unspecified:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])

    def _call(self, call: Callable[[], T]) -> T:
        """Run a call that uses the store, with a time limit.

        Raises:
            CommunicationError: when the store is gone, or does not answer.
        """
        try:
            return self._caller.call(call, self._seconds)
        except TimeoutError as error:
            raise CommunicationError(
                f"the islands' meeting place at {self.address} has not answered for {self._seconds:g} s: the launcher "
                "that serves it hangs, or the network does"
            ) from error
        except RuntimeError as error:
            raise CommunicationError(
                f"the islands' meeting place at {self.address} is gone: {first_line(error)}"
            ) from error

    def switch_generation(self, number: int) -> None:
        """Switch to a generation."""
        self.generation = number
        self.box = dist.PrefixStore(f"{number}", self.root)

    def newest_generation(self) -> int:
        """The number of the newest generation."""
        text = self._call(lambda: self.root.compare_set(_GENERATION, "", "1"))
        with self.decoding(_GENERATION):
            return int(text)

    def end_generation(self) -> None:
        """Begin the generation after this one, unless another island has."""
        number = self.generation
        self._call(lambda: self.root.compare_set(_GENERATION, str(number), str(number + 1)))

    def get(self, key: str, decode: Callable[[Any], Any] = lambda value: value) -> Any:
        """The value of a key of this generation; None if it is not set yet.

        Args:
            key: the key.
            decode: parses and checks the value; anyone who reaches the store may have written it.

        Raises:
            CommunicationError: when the store is gone, or the value is malformed.
        """
        text = self._call(lambda: self.box.get(key) if self.box.check([key]) else None)
        if text is None:
            return None
        with self.decoding(key):
            return decode(json.loads(text))

    @contextmanager
    def decoding(self, key: str) -> Iterator[None]:
        """Context for parsing a value of this store.

        Raises:
            CommunicationError: when no island would write such a value.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            raise CommunicationError(
                f"the islands' meeting place at {self.address} holds something else than an island writes, at {key}: "
                f"{first_line(error)}"
            ) from error

    def put(self, key: str, value: Any) -> None:
        """Set a key."""
        self._call(lambda: self.box.set(key, json.dumps(value)))

    def decide(self, key: str, value: Any) -> None:
        """Set a key, unless it has a value already."""
        self._call(lambda: self.box.compare_set(key, "", json.dumps(value)))

    def note_end(self, island: int, has_ended: bool = True) -> None:
        """Record that an island's launcher has ended, so the island will not come; or that the island is back."""
        self._call(lambda: note_end(self._tcp, island, has_ended))

    def have_ended(self, islands: Iterable[int]) -> bool:
        """Whether all of the given islands are known to have ended."""
        keys = [_end_key(island) for island in islands]
        return self._call(lambda: all(self.root.check([key]) and self.root.get(key) == b"1" for key in keys))

    def increment(self, key: str) -> int:
        """Increment a counter; return a number that no other caller gets for this key."""
        return self._call(lambda: self.box.add(key, 1))

    def wait_for(
        self, key: str, on_poll: Callable[[], None] = lambda: None, decode: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Poll a key until it has a value. ``on_poll`` is called in between; it may set the key, or raise an error.

        Returns the raw value, once ``decode`` accepts it; see ``get``.
        """
        while self.get(key, decode) is None:
            on_poll()
            time.sleep(POLL_SECONDS)
        return self.get(key)

    def start_heartbeats(self, island: int) -> None:
        """Start the heartbeats of an island, in a thread."""
        self.stop_heartbeats()
        self._stop_event = threading.Event()
        tcp: Any = self._tcp  # cloned, as another thread uses this connection
        store = dist.PrefixStore(f"{self.generation}", dist.PrefixStore(_PREFIX, tcp.clone()))
        self._heartbeats = threading.Thread(
            target=_send_heartbeats, args=(store, island, self._stop_event), name="islands", daemon=True
        )
        self._heartbeats.start()

    def stop_heartbeats(self) -> None:
        """Stop the heartbeats of this island."""
        if self._heartbeats is not None:
            self._stop_event.set()
            self._heartbeats.join(_THREAD_SECONDS)
            self._heartbeats = None

    def count_heartbeats(self, islands: Iterable[int]) -> dict[int, int]:
        """Count the heartbeats of each island so far."""
        return self._call(lambda: {island: self.box.add(f"{_ALIVE}/{island}", 0) for island in islands})


def _send_heartbeats(store: dist.Store, island: int, stop: threading.Event) -> None:
    with suppress(RuntimeError):  # the training thread will report that the store is gone
        while not stop.is_set():
            store.add(f"{_ALIVE}/{island}", 1)
            stop.wait(HEARTBEAT_SECONDS)


class HeartbeatMonitor:
    """Monitor of the islands' heartbeats, by this process's clock.

    Args:
        store: the store with their heartbeats.
        islands: numbers of the islands.
    """

    def __init__(self, store: IslandStore, islands: Collection[int]) -> None:
        self._store = store
        current_time = time.monotonic()
        self._seen = {island: (count, current_time) for island, count in store.count_heartbeats(islands).items()}
        self._read = current_time

    def find_silent(self) -> set[int]:
        """Find the islands without a new heartbeat for ``SILENT_SECONDS``."""
        current_time = time.monotonic()
        if current_time - self._read >= HEARTBEAT_SECONDS:
            self._read = current_time
            for island, count in self._store.count_heartbeats(self._seen).items():
                if count != self._seen[island][0]:
                    self._seen[island] = (count, current_time)
        return {island for island, (_, last) in self._seen.items() if current_time - last > SILENT_SECONDS}

"""Ranks as threads on pretended devices: messages and kernels wait for each other as on CUDA with NCCL.

A receive and a send occupy their rank's device from the moment they are issued until their peer has issued the other.
Those with the same peer in the same group are carried out strictly in the order issued. The first launch of a kernel
waits until nothing of its rank is left on its device. When every rank waits, the run is a deadlock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.distributed.group import Group, Pending


class DeadlockError(Exception):
    """All ranks wait for each other; the message names the operations."""


@dataclass(eq=False)
class InFlightFragment:
    """A send or a receive that was issued."""

    rank: int
    receives: bool
    x: Tensor
    tag: int
    what: str
    done: bool = False
    known: bool = False
    """The host has been told that it is done."""


@dataclass
class Fabric:
    """All devices of a run, and their connections."""

    ranks: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[int, tuple[str, Callable[[], bool]]] = field(default_factory=dict)
    left: int = 0
    stuck: str | None = None
    streams: dict[tuple[str, int, int], deque[InFlightFragment]] = field(default_factory=lambda: defaultdict(deque))
    """Of a group, a rank and its peer."""

    def issue(self, flight: InFlightFragment, group: str, peer: int) -> None:
        """Puts a message on its rank's device, and carries out messages with both ends issued."""
        with self.lock:
            stream, other = self.streams[group, flight.rank, peer], self.streams[group, peer, flight.rank]
            stream.append(flight)
            while stream and other and stream[0].receives != other[0].receives:
                receive, send = sorted((stream.popleft(), other.popleft()), key=lambda end: not end.receives)
                assert receive.tag == send.tag, f"{receive.what} and {send.what} do not belong together"
                receive.x.copy_(send.x)
                receive.done = send.done = True
            self.lock.notify_all()

    def wait(self, rank: int, operation: str, ready: Callable[[], bool]) -> None:
        """Blocks a rank.

        Raises:
            DeadlockError: when no rank can go on.
        """
        with self.lock:
            self.waiting[rank] = (operation, ready)
            while not ready():
                self._look()
                if self.stuck is not None:
                    raise DeadlockError(self.stuck)
                self.lock.wait()
            del self.waiting[rank]

    def leave(self) -> None:
        """A rank has ended."""
        with self.lock:
            self.left += 1
            self._look()
            self.lock.notify_all()

    def _look(self) -> None:
        """Notes a deadlock: every rank that has not ended waits, and none of them can go on."""
        all_wait = self.waiting and len(self.waiting) == self.ranks - self.left
        if all_wait and self.stuck is None and not any(ready() for _, ready in self.waiting.values()):
            self.stuck = "; ".join(f"rank {rank}: {operation}" for rank, (operation, _) in sorted(self.waiting.items()))
            self.lock.notify_all()


class SpinningDevice:
    """A rank's device.

    Attributes:
        violations: kernels that were launched for the first time beside a receive not yet known to
            the host as done.
        ahead: most receives that were pending at a launch.
    """

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank
        self.flights: list[InFlightFragment] = []
        self.loaded: set[Hashable] = set()
        self.violations: list[str] = []
        self.ahead = 0

    def launch(self, kernel: Hashable) -> None:
        """Starts a kernel, loading it if it is new."""
        receives = [flight for flight in self.flights if flight.receives and not flight.known]
        self.ahead = max(self.ahead, len(receives))
        if kernel in self.loaded:
            return
        self.violations += [f"{kernel} beside {flight.what}" for flight in receives[:1]]
        message = f"loads {kernel} behind " + ", ".join(flight.what for flight in self.flights if not flight.done)
        self.fabric.wait(self.rank, message, lambda: all(flight.done for flight in self.flights))
        self.loaded.add(kernel)

    def put(self, flight: InFlightFragment, group: str, peer: int) -> Pending:
        """Issues a message."""
        self.flights = [other for other in self.flights if not other.done or (other.receives and not other.known)]
        self.flights.append(flight)
        self.fabric.issue(flight, group, peer)
        return _SpinningPending(_Work(self, flight), 0, flight.what)


@dataclass
class _Work:
    device: SpinningDevice
    flight: InFlightFragment

    def wait(self) -> None:
        """Later kernels wait on the device. The host goes on, and need not know when that is over."""
        self.device.fabric.wait(self.device.rank, self.flight.what, lambda: self.flight.done)

    def is_completed(self) -> bool:
        return self.flight.done


class _SpinningPending(Pending):
    """Remembers its flight beyond ``wait``."""

    def __init__(self, work: _Work, sent_bytes: int, label: str) -> None:
        super().__init__(work, sent_bytes, label)
        self.spinning = work

    def synchronize(self) -> None:
        """The host learns that this receive is done, and all that were done before."""
        device = self.spinning.device
        device.fabric.wait(device.rank, self.description, lambda: self.spinning.flight.done)
        for flight in device.flights:
            flight.known |= flight.done and flight.receives


class SpinningLink(Group):
    """A pipeline's ranks, with a process group for messages to higher ranks and another for messages to lower ranks."""

    def __init__(self, device: SpinningDevice, size: int, name: str) -> None:
        super().__init__(None, tuple(range(size)), device.rank, name, "none")
        self.device = device

    def send(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        return self._put(False, x, dst, tag, upwards=dst > self.rank)

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        return self._put(True, x, src, tag, upwards=src < self.rank)

    def _put(self, receives: bool, x: Tensor, peer: int, tag: int, upwards: bool) -> Pending:
        label = f"{'receive from' if receives else 'send to'} rank {peer} at {self.name} {tag}"
        return self.device.put(InFlightFragment(self.rank, receives, x, tag, label), f"{self.name} {upwards}", peer)


def run_threads(size: int, rank_main: Callable[[SpinningDevice], Any]) -> list[Any]:
    """Runs a function on every rank; the results.

    Raises:
        DeadlockError: when all ranks wait.
    """
    fabric = Fabric(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = rank_main(SpinningDevice(fabric, rank))
        except BaseException as error:
            errors.append(error)
        finally:
            fabric.leave()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_first(errors)
    return results


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raises the original error, rather than the deadlock that followed from it."""
    for error in sorted(errors, key=lambda error: isinstance(error, DeadlockError)):
        raise error

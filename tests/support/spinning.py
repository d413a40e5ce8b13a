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
class PendingMessage:
    """A send or a receive that was issued."""

    rank: int
    receives: bool
    x: Tensor
    tag: int
    description: str
    done: bool = False
    seen_by_host: bool = False
    """The host knows that it is done."""


@dataclass
class Fabric:
    """All devices of a run, and their connections."""

    ranks: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    blocked: dict[int, tuple[str, Callable[[], bool]]] = field(default_factory=dict)
    """By rank, the operation that it waits for, and whether that can go on."""
    ended: int = 0
    """Ranks that have ended."""
    deadlock: str | None = None
    streams: dict[tuple[str, int, int], deque[PendingMessage]] = field(default_factory=lambda: defaultdict(deque))
    """Of a group, a rank and its peer."""

    def issue(self, message: PendingMessage, group: str, peer: int) -> None:
        """Puts a message on its rank's device, and carries out messages with both ends issued."""
        with self.lock:
            stream, other = self.streams[group, message.rank, peer], self.streams[group, peer, message.rank]
            stream.append(message)
            while stream and other and stream[0].receives != other[0].receives:
                receive, send = sorted((stream.popleft(), other.popleft()), key=lambda end: not end.receives)
                assert receive.tag == send.tag, f"{receive.description} and {send.description} do not belong together"
                receive.x.copy_(send.x)
                receive.done = send.done = True
            self.lock.notify_all()

    def wait(self, rank: int, operation: str, ready: Callable[[], bool]) -> None:
        """Blocks a rank.

        Raises:
            DeadlockError: when no rank can go on.
        """
        with self.lock:
            self.blocked[rank] = (operation, ready)
            while not ready():
                self._note_deadlock()
                if self.deadlock is not None:
                    raise DeadlockError(self.deadlock)
                self.lock.wait()
            del self.blocked[rank]

    def leave(self) -> None:
        """A rank has ended."""
        with self.lock:
            self.ended += 1
            self._note_deadlock()
            self.lock.notify_all()

    def _note_deadlock(self) -> None:
        """Notes a deadlock: every rank that has not ended waits, and none can go on."""
        all_wait = self.blocked and len(self.blocked) == self.ranks - self.ended
        if all_wait and self.deadlock is None and not any(ready() for _, ready in self.blocked.values()):
            self.deadlock = "; ".join(
                f"rank {rank}: {operation}" for rank, (operation, _) in sorted(self.blocked.items())
            )
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
        self.messages: list[PendingMessage] = []
        self.loaded: set[Hashable] = set()
        self.violations: list[str] = []
        self.ahead = 0

    def launch(self, kernel: Hashable) -> None:
        """Starts a kernel, loading it if it is new."""
        receives = [message for message in self.messages if message.receives and not message.seen_by_host]
        self.ahead = max(self.ahead, len(receives))
        if kernel in self.loaded:
            return
        self.violations += [f"{kernel} beside {message.description}" for message in receives[:1]]
        operation = f"loads {kernel} behind " + ", ".join(
            message.description for message in self.messages if not message.done
        )
        self.fabric.wait(self.rank, operation, lambda: all(message.done for message in self.messages))
        self.loaded.add(kernel)

    def put(self, message: PendingMessage, group: str, peer: int) -> Pending:
        """Issues a message."""
        self.messages = [
            other for other in self.messages if not other.done or (other.receives and not other.seen_by_host)
        ]
        self.messages.append(message)
        self.fabric.issue(message, group, peer)
        return _SpinningPending(_Work(self, message), 0, message.description)


@dataclass
class _Work:
    device: SpinningDevice
    message: PendingMessage

    def wait(self) -> None:
        """Later kernels wait on the device. The host goes on, and need not know when that is over."""
        self.device.fabric.wait(self.device.rank, self.message.description, lambda: self.message.done)

    def is_completed(self) -> bool:
        return self.message.done


class _SpinningPending(Pending):
    """Remembers its message beyond ``wait``."""

    def __init__(self, work: _Work, sent_bytes: int, description: str) -> None:
        super().__init__(work, sent_bytes, description)
        self.spinning = work

    def synchronize(self) -> None:
        """The host learns that this receive is done, and all that were done before."""
        device = self.spinning.device
        device.fabric.wait(device.rank, self.description, lambda: self.spinning.message.done)
        for message in device.messages:
            message.seen_by_host |= message.done and message.receives


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
        description = f"{'receive from' if receives else 'send to'} rank {peer} at {self.name} {tag}"
        return self.device.put(PendingMessage(self.rank, receives, x, tag, description), f"{self.name} {upwards}", peer)


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

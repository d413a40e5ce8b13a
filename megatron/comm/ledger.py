"""Counts what each communication point sends, and where the time of this rank's device goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron.comm.observer import Observer
from megatron.compression.points import Point
from megatron.topology.clock import Clock, HostClock, Mark, Tell
from megatron.topology.group import NOTHING, Pending

_FLIGHTS = {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}


@dataclass
class Account:
    """Totals of one point on this rank.

    Args:
        messages: collectives and messages started.
        raw_bytes: bytes this rank would have sent uncompressed.
        wire_bytes: bytes this rank sent, headers included.
        inside_bytes: those of them that sums in two levels, and rows in two stages, sent inside this rank's node.
        waited_s: seconds that the rank (its stream, on CUDA) was blocked on the point: exposed communication.
        coded_s: seconds of encoding and decoding.
    """

    messages: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    inside_bytes: int = 0
    waited_s: float = 0.0
    coded_s: float = 0.0


class _Books:
    """Accounts by point, of sending and waiting, and seconds of computing. An interval is booked where it began,
    however late it is read."""

    def __init__(self) -> None:
        self.accounts = {point: Account() for point in Point}
        self.took_part: set[Point] = set()
        self.computed_s = 0.0

    def wait(self, point: Point, seconds: float) -> None:
        self.accounts[point].waited_s += seconds

    def code(self, point: Point, seconds: float) -> None:
        self.accounts[point].coded_s += seconds

    def compute(self, seconds: float) -> None:
        self.computed_s += seconds


@dataclass
class _OpenSpan:
    """A timed block that is still open, and when it last became the innermost one."""

    tell: Tell
    since: Mark


class Ledger:
    """Accounts of all points, since the last ``take``; observers see what is timed as well.

    Times exclude each other: a block's time is its own, without that of timed blocks inside. So computing, coding and
    waiting add up. On CUDA an interval is known some time after its block, and is in the window that is taken then.

    Args:
        clock: clock of this rank's device; by default the host's.
        observers: observers of all of this rank's communication points; more may join later.
    """

    def __init__(self, clock: Clock | None = None, observers: Sequence[Observer] = ()) -> None:
        self.clock: Clock = clock or HostClock()
        self.observers = list(observers)
        self._books = _Books()
        self._open: list[_OpenSpan] = []

    @property
    def accounts(self) -> dict[Point, Account]:
        """The accounts of this window."""
        return self._books.accounts

    def sent(self, point: Point, wire_bytes: int, raw_bytes: int | None = None, inside_bytes: int = 0) -> None:
        """Counts one message; ``raw_bytes`` is its size uncompressed (default: the same), and ``inside_bytes`` is what
        is known to stay in this rank's node."""
        account = self.accounts[point]
        self._books.took_part.add(point)
        account.messages += 1
        account.wire_bytes += wire_bytes
        account.inside_bytes += inside_bytes
        account.raw_bytes += wire_bytes if raw_bytes is None else raw_bytes

    def wait(self, point: Point, pending: Pending) -> None:
        """Waits for a communication, and times how long that blocks.

        Raises:
            CommunicationError: when a peer is gone or too slow.
        """
        if pending.what == NOTHING:
            pending.wait()
            return
        self._books.took_part.add(point)
        with self._timed(partial(self._books.wait, point)), self.span("wait", point=point.value):
            pending.wait()
        for observer in self.observers:
            observer.on_complete(_FLIGHTS.get(pending.kind, pending.kind), point, pending)

    def encoding(self, point: Point) -> AbstractContextManager[None]:
        """Times the work on a tensor before it is sent."""
        return self._coding(point, "encode")

    def decoding(self, point: Point) -> AbstractContextManager[None]:
        """Times the work on what was received."""
        return self._coding(point, "decode")

    @contextmanager
    def _coding(self, point: Point, name: str) -> Iterator[None]:
        with self._timed(partial(self._books.code, point)), self.span(name, point=point.value):
            yield

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Shows observers a named block."""
        return self._observed(name, args) if self.observers else nullcontext()

    @contextmanager
    def _observed(self, name: str, args: dict[str, Any]) -> Iterator[None]:
        with ExitStack() as spans:
            for observer in self.observers:
                spans.enter_context(observer.span(name, **args))
            yield

    def computing(self) -> AbstractContextManager[None]:
        """Times computing: neither encoding, decoding nor waiting."""
        return self._timed(self._books.compute)

    @contextmanager
    def _timed(self, tell: Tell) -> Iterator[None]:
        start = self.clock.mark()
        if self._open:
            outer = self._open[-1]
            self.clock.between(outer.since, start, outer.tell)
        span = _OpenSpan(tell, start)
        self._open.append(span)
        try:
            yield
        finally:
            stop = self.clock.mark()
            self.clock.between(span.since, stop, tell)
            self._open.pop()
            if self._open:
                self._open[-1].since = stop

    def take(self) -> dict[str, dict[str, float]]:
        """Returns the accounts with traffic, by point name, and starts new ones. A receiving rank has times alone."""
        self.clock.read()
        books = self._books
        seen = {point: own for point, own in books.accounts.items() if point in books.took_part or own.waited_s}
        books.accounts, books.took_part = {point: Account() for point in Point}, set()
        return {point.value: asdict(account) for point, account in seen.items()}

    def take_computed(self) -> float:
        """Returns the seconds of computing since the last call."""
        self.clock.read()
        seconds, self._books.computed_s = self._books.computed_s, 0.0
        return seconds

    def clear(self) -> None:
        """Starts anew; intervals that began before are dropped when they are read."""
        self._books = _Books()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leaves what is sent and timed inside uncounted."""
        kept, self._books = self._books, _Books()
        try:
            yield
        finally:
            self._books = kept

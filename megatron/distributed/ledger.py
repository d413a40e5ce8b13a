"""Accounting of each communication point's traffic, and of this rank's device time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron.compression.points import Point
from megatron.distributed.clock import Clock, HostClock, Mark, Tell
from megatron.distributed.group import NOTHING, Pending
from megatron.distributed.observer import Observer

_FLIGHTS = {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}


@dataclass
class Account:
    """Totals of a point on this rank.

    Args:
        messages: collectives and messages started.
        raw_bytes: bytes this rank would have sent uncompressed.
        wire_bytes: bytes this rank sent, headers included.
        inside_bytes: the part of ``wire_bytes`` that two-level sums and two-stage dispatches sent inside the node.
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
    """Accounts by point, and seconds of computing. An interval is booked in the ``_Books`` that was current when it
    began, even if it is read later."""

    def __init__(self) -> None:
        self.accounts = {point: Account() for point in Point}
        self.took_part: set[Point] = set()
        self.computed_s = 0.0

    def add_wait(self, point: Point, seconds: float) -> None:
        self.accounts[point].waited_s += seconds

    def code(self, point: Point, seconds: float) -> None:
        self.accounts[point].coded_s += seconds

    def compute(self, seconds: float) -> None:
        self.computed_s += seconds


class _Timed:
    """A timed block. A class, because the overhead of a generator context exceeds the time of some blocks.

    Args:
        ledger: the ledger.
        tell: callback that receives the seconds.
        span: the observers' span of the block; None without observers.
    """

    __slots__ = ("_ledger", "_span", "_tell", "since")

    def __init__(self, ledger: Ledger, tell: Tell, span: AbstractContextManager[None] | None = None) -> None:
        self._ledger, self._tell, self._span = ledger, tell, span
        self.since: Mark = None

    def __enter__(self) -> None:
        if self._span is not None:
            self._span.__enter__()
        clock, blocks = self._ledger.clock, self._ledger.open_blocks
        self.since = clock.mark()
        if blocks:
            blocks[-1].tell_until(self.since)
        blocks.append(self)

    def __exit__(self, *error: Any) -> None:
        clock, blocks = self._ledger.clock, self._ledger.open_blocks
        stop = clock.mark()
        self.tell_until(stop)
        blocks.pop()
        if blocks:
            blocks[-1].since = stop
        if self._span is not None:
            self._span.__exit__(*error)

    def tell_until(self, stop: Mark) -> None:
        """Report the time since this block became the innermost block."""
        self._ledger.clock.between(self.since, stop, self._tell)


class Ledger:
    """Accounts of all points since the last ``take_totals``; timed blocks are also reported to observers.

    Times are exclusive: a block's time does not include nested timed blocks, so computing, coding and waiting add up.
    On CUDA an interval becomes known some time after its block, and counts in the window that is taken then.

    Args:
        clock: clock of this rank's device; by default the host's.
        observers: observers of this rank's communication points; more may join later.

    ``open_blocks`` are the open timed blocks, innermost last.
    """

    def __init__(self, clock: Clock | None = None, observers: Sequence[Observer] = ()) -> None:
        self.clock: Clock = clock or HostClock()
        self.observers = list(observers)
        self._books = _Books()
        self.open_blocks: list[_Timed] = []

    @property
    def accounts(self) -> dict[Point, Account]:
        """The accounts of this window."""
        return self._books.accounts

    def sent(self, point: Point, wire_bytes: int, raw_bytes: int | None = None, inside_bytes: int = 0) -> None:
        """Count a message; ``raw_bytes`` is its uncompressed size (default: the same), and ``inside_bytes`` the part
        that is known to stay in this rank's node."""
        account = self.accounts[point]
        self._books.took_part.add(point)
        account.messages += 1
        account.wire_bytes += wire_bytes
        account.inside_bytes += inside_bytes
        account.raw_bytes += wire_bytes if raw_bytes is None else raw_bytes

    def wait_for(self, point: Point, pending: Pending) -> None:
        """Wait for a communication, and time how long it blocks.

        Raises:
            CommunicationError: when a peer is gone or too slow.
        """
        if pending.description == NOTHING:
            pending.wait()
            return
        self._books.took_part.add(point)
        with self._timed(partial(self._books.add_wait, point), "wait", point):
            pending.wait()
        for observer in self.observers:
            observer.on_complete(_FLIGHTS.get(pending.operation, pending.operation), point, pending)

    def encoding(self, point: Point) -> AbstractContextManager[None]:
        """Time the encoding of a tensor before it is sent."""
        return self._timed(partial(self._books.code, point), "encode", point)

    def decoding(self, point: Point) -> AbstractContextManager[None]:
        """Time the decoding of a received tensor."""
        return self._timed(partial(self._books.code, point), "decode", point)

    def _timed(self, tell: Tell, name: str, point: Point) -> _Timed:
        return _Timed(self, tell, self._observed(name, {"point": point.value}) if self.observers else None)

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Report a named block to the observers."""
        return self._observed(name, args) if self.observers else nullcontext()

    @contextmanager
    def _observed(self, name: str, args: dict[str, Any]) -> Iterator[None]:
        with ExitStack() as spans:
            for observer in self.observers:
                spans.enter_context(observer.span(name, **args))
            yield

    def computing(self) -> AbstractContextManager[None]:
        """Time computing, without the encoding, decoding and waiting inside."""
        return _Timed(self, self._books.compute)

    def take_totals(self) -> dict[str, dict[str, float]]:
        """Return the accounts with traffic, by point name, and reset. A rank that only receives has only times."""
        self.clock.report_known()
        books = self._books
        active = {
            point: totals for point, totals in books.accounts.items() if point in books.took_part or totals.waited_s
        }
        books.accounts, books.took_part = {point: Account() for point in Point}, set()
        return {point.value: asdict(account) for point, account in active.items()}

    def take_computed(self) -> float:
        """Return the seconds of computing since the last call."""
        self.clock.report_known()
        seconds, self._books.computed_s = self._books.computed_s, 0.0
        return seconds

    def clear(self) -> None:
        """Reset; intervals that began before are dropped when they are read."""
        self._books = _Books()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude traffic and times inside the context from the accounts."""
        books, self._books = self._books, _Books()
        try:
            yield
        finally:
            self._books = books

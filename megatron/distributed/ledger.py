"""Traffic and time of each communication point on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.points import Point
from megatron.distributed.clock import Clock, HostClock, Mark, Tell
from megatron.distributed.group import NOTHING, Group, Pending
from megatron.distributed.observer import Observer

C = TypeVar("C", Codec, RoundCompressor)

_TRACE_NAMES = {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}
"""Names of operations for observers, where they differ from those of ``Pending.operation``."""


@dataclass
class Account:
    """Totals of a communication point on this rank.

    Args:
        messages: number of collectives and messages.
        raw_bytes: bytes that this rank would have sent uncompressed.
        wire_bytes: bytes that this rank sent, including headers.
        inside_bytes: intra-node bytes of two-level sums and two-stage dispatches, included in ``wire_bytes``.
        waited_s: seconds of exposed communication: the rank (on CUDA, its stream) was blocked.
        coded_s: seconds of encoding and decoding.
    """

    messages: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    inside_bytes: int = 0
    waited_s: float = 0.0
    coded_s: float = 0.0


class _Accounts:
    """Accounts by point, and seconds of computing. An interval counts in the ``_Accounts`` that were current when it
    began, even if its length is known only later."""

    def __init__(self) -> None:
        self.accounts = {point: Account() for point in Point}
        self.active_points: set[Point] = set()
        self.computed_s = 0.0

    def add_wait(self, point: Point, seconds: float) -> None:
        self.accounts[point].waited_s += seconds

    def add_coding(self, point: Point, seconds: float) -> None:
        self.accounts[point].coded_s += seconds

    def add_computing(self, seconds: float) -> None:
        self.computed_s += seconds


class _Timed:
    """Context that reports the seconds of a block; a class, because a generator context takes longer than some blocks.

    ``span`` is the observers' span of the block; None without observers.
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
    """Accounts of all points since the last ``take_totals``. Observers receive all timed blocks.

    A block's time does not include nested timed blocks, so the times for computing, coding and waiting add up. On CUDA,
    the length of an interval is known after a delay, and counts in the next ``take_totals``.

    Args:
        clock: clock of this rank's device; the host's clock by default.
        observers: observers of this rank's communication points; callers may append to the list.

    ``open_blocks`` are the timed blocks that have not ended, innermost last. ``sent_bytes``, by point, and
    ``sent_messages`` count everything that this rank has sent, including the traffic that the accounts exclude;
    ``uncompressed_bytes`` is what ``sent_bytes`` would be without compression.
    """

    def __init__(self, clock: Clock | None = None, observers: Sequence[Observer] = ()) -> None:
        self.clock: Clock = clock or HostClock()
        self.observers = list(observers)
        self._accounts = _Accounts()
        self.open_blocks: list[_Timed] = []
        self.sent_bytes: Counter[Point] = Counter()
        self.uncompressed_bytes: Counter[Point] = Counter()
        self.sent_messages = 0

    @property
    def accounts(self) -> dict[Point, Account]:
        """Accounts since the last ``take_totals``."""
        return self._accounts.accounts

    def count_message(self, point: Point, wire_bytes: int, raw_bytes: int | None = None, inside_bytes: int = 0) -> None:
        """Count a message. ``raw_bytes`` is its uncompressed size (default: ``wire_bytes``), ``inside_bytes`` its
        intra-node bytes."""
        account = self.accounts[point]
        self._accounts.active_points.add(point)
        self.sent_bytes[point] += wire_bytes
        self.sent_messages += 1
        account.messages += 1
        account.wire_bytes += wire_bytes
        account.inside_bytes += inside_bytes
        uncompressed_bytes = wire_bytes if raw_bytes is None else raw_bytes
        account.raw_bytes += uncompressed_bytes
        self.uncompressed_bytes[point] += uncompressed_bytes

    def wait_for(self, point: Point, pending: Pending) -> None:
        """Wait for an operation and time the wait.

        Raises:
            CommunicationError: when a peer has failed or timed out.
        """
        if pending.description == NOTHING:
            pending.wait()
            return
        self._accounts.active_points.add(point)
        with self._timed(partial(self._accounts.add_wait, point), "wait", point):
            pending.wait()
        for observer in self.observers:
            observer.on_complete(_TRACE_NAMES.get(pending.operation, pending.operation), point, pending)

    def complete(self, point: Point, pending: Pending, raw_bytes: int | None = None, inside_bytes: int = 0) -> None:
        """Count the message of an operation, and wait for the operation."""
        self.count_message(point, pending.sent_bytes, raw_bytes, inside_bytes)
        self.wait_for(point, pending)

    def encoding(self, point: Point) -> AbstractContextManager[None]:
        """Time the encoding of a message."""
        return self._timed(partial(self._accounts.add_coding, point), "encode", point)

    def decoding(self, point: Point) -> AbstractContextManager[None]:
        """Time the decoding of a message."""
        return self._timed(partial(self._accounts.add_coding, point), "decode", point)

    def audited(self, point: Point, compressor: C) -> C:
        """The compressor for a point's next tensor, wrapped by observers that audit it."""
        for observer in self.observers:
            compressor = observer.audit(point, compressor)
        return compressor

    def _timed(self, tell: Tell, name: str, point: Point) -> _Timed:
        return _Timed(self, tell, self._observed(name, {"point": point.value}) if self.observers else None)

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Report a block to the observers, under this name."""
        return self._observed(name, args) if self.observers else nullcontext()

    @contextmanager
    def _observed(self, name: str, args: dict[str, Any]) -> Iterator[None]:
        with ExitStack() as spans:
            for observer in self.observers:
                spans.enter_context(observer.span(name, **args))
            yield

    def computing(self) -> AbstractContextManager[None]:
        """Time computation, excluding nested encoding, decoding and waiting."""
        return _Timed(self, self._accounts.add_computing)

    def take_totals(self) -> dict[str, dict[str, float]]:
        """Return the accounts of all points in use, by point name, and reset them. A rank that only receives has times,
        but no messages."""
        self.clock.report_known()
        current = self._accounts
        active = {
            point: account
            for point, account in current.accounts.items()
            if point in current.active_points or account.waited_s
        }
        current.accounts, current.active_points = {point: Account() for point in Point}, set()
        return {point.value: asdict(account) for point, account in active.items()}

    def take_computed(self) -> float:
        """Return the seconds of computation since the last call."""
        self.clock.report_known()
        seconds, self._accounts.computed_s = self._accounts.computed_s, 0.0
        return seconds

    def clear(self) -> None:
        """Reset all accounts, and drop intervals that have already begun."""
        self._accounts = _Accounts()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the context's traffic and times from the accounts."""
        counted, self._accounts = self._accounts, _Accounts()
        try:
            yield
        finally:
            self._accounts = counted


def gather_rows(group: Group, ledger: Ledger, values: list[float]) -> list[list[float]]:
    """All-gather every rank's numbers, in rank order."""
    row = torch.tensor([values], dtype=torch.float64)
    rows = torch.empty((group.size, len(values)), dtype=torch.float64)
    pending = group.all_gather(rows, row)
    ledger.count_message(Point.CONTROL, pending.sent_bytes)
    pending.wait()
    return [[float(x) for x in numbers] for numbers in rows.tolist()]

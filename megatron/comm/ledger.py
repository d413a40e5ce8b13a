"""Counts what each communication point sends, and how long its callers waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass

from megatron.comm.trace import Trace
from megatron.compression.points import Point
from megatron.topology.group import NOTHING, Pending

_FLIGHTS = {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}


@dataclass
class Account:
    """Totals of one point on this rank.

    Args:
        messages: collectives and messages started.
        raw_bytes: bytes this rank would have sent uncompressed.
        wire_bytes: bytes this rank sent, headers included.
        waited_s: seconds that callers were blocked on the point (communication that nothing hid).
        coded_s: seconds of encoding and decoding.
    """

    messages: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    waited_s: float = 0.0
    coded_s: float = 0.0


class Ledger:
    """Accounts of all points, since the last ``take``; what it times goes to the trace as well.

    Args:
        trace: of this rank; by default one that records nothing.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.accounts = {point: Account() for point in Point}

    def sent(self, point: Point, wire_bytes: int, raw_bytes: int | None = None) -> None:
        """Notes one message; ``raw_bytes`` is what it would have been uncompressed (default: the same)."""
        account = self.accounts[point]
        account.messages += 1
        account.wire_bytes += wire_bytes
        account.raw_bytes += wire_bytes if raw_bytes is None else raw_bytes

    def wait(self, point: Point, pending: Pending) -> None:
        """Waits for a communication, and times how long that blocks.

        Raises:
            CommunicationError: when a peer is gone or too slow.
        """
        start = time.perf_counter()
        try:
            with self.trace.span("wait", point=point.value):
                pending.wait()
        finally:
            if pending.what != NOTHING:
                self.accounts[point].waited_s += time.perf_counter() - start
        self.trace.flight(_FLIGHTS.get(pending.kind, pending.kind), point.value, pending.started, pending.sent_bytes)

    def encoding(self, point: Point) -> AbstractContextManager[None]:
        """Times what is done to a tensor before it is sent."""
        return self._coding(point, "encode")

    def decoding(self, point: Point) -> AbstractContextManager[None]:
        """Times what is done to what arrived."""
        return self._coding(point, "decode")

    @contextmanager
    def _coding(self, point: Point, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.trace.span(name, point=point.value):
                yield
        finally:
            self.accounts[point].coded_s += time.perf_counter() - start

    def take(self) -> dict[str, dict[str, float]]:
        """The accounts that saw traffic, by point name; starts new ones. A rank that only receives has waits alone."""
        seen = {point: account for point, account in self.accounts.items() if account.messages or account.waited_s}
        taken = {point.value: asdict(account) for point, account in seen.items()}
        self.accounts = {point: Account() for point in Point}
        return taken

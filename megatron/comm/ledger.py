"""Counts what each communication point sends, and how long its callers waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from megatron.compression.points import Point


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
    """Accounts of all points, since the last ``take``."""

    def __init__(self) -> None:
        self.accounts = {point: Account() for point in Point}

    def sent(self, point: Point, wire_bytes: int, raw_bytes: int | None = None) -> None:
        """Notes one message; ``raw_bytes`` is what it would have been uncompressed (default: the same)."""
        account = self.accounts[point]
        account.messages += 1
        account.wire_bytes += wire_bytes
        account.raw_bytes += wire_bytes if raw_bytes is None else raw_bytes

    @contextmanager
    def waiting(self, point: Point) -> Iterator[None]:
        """Times a blocking wait."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.accounts[point].waited_s += time.perf_counter() - start

    @contextmanager
    def encoding(self, point: Point) -> Iterator[None]:
        """Times encoding or decoding."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.accounts[point].coded_s += time.perf_counter() - start

    def take(self) -> dict[str, dict[str, float]]:
        """The accounts that saw traffic, by point name; starts new ones."""
        taken = {point.value: asdict(account) for point, account in self.accounts.items() if account.messages}
        self.accounts = {point: Account() for point in Point}
        return taken

"""Gradient buckets -> sums over the data-parallel group, overlapped with backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.points import Point
from megatron.comm.rounds import RoundsInFlight
from megatron.compression.api import RoundCompressor
from megatron.compression.state import CompressorState
from megatron.topology.group import Group


class GradReducer:
    """Sums buckets over a group, each as soon as it and all before it are ready.

    Buckets are launched in the order of the list, whatever the order in which they become ready, so that every
    rank issues its collectives in the same order by construction.

    Args:
        buckets: flat contiguous gradients; with ``sharded`` each length divides by the group's size.
        group: the data-parallel ranks.
        compressor: the algorithm that sums, shared by all buckets.
        ledger: where the bytes are counted.
        sharded: each rank needs only its own share of each sum.
    """

    def __init__(
        self,
        buckets: Sequence[Tensor],
        group: Group,
        compressor: RoundCompressor,
        ledger: Ledger,
        sharded: bool,
    ) -> None:
        self.buckets = buckets
        self.group = group
        self.compressor = compressor
        self.ledger = ledger
        self.sharded = sharded
        self.states = [CompressorState() for _ in buckets]
        self._ready = [False] * len(buckets)
        self._in_flight: list[RoundsInFlight] = []

    def mark_ready(self, index: int) -> None:
        """Bucket ``index`` holds its final local gradient; launches every bucket whose turn has come."""
        self._ready[index] = True
        while len(self._in_flight) < len(self.buckets) and self._ready[len(self._in_flight)]:
            turn = len(self._in_flight)
            self._in_flight.append(
                RoundsInFlight(
                    self.compressor,
                    self.buckets[turn],
                    self.states[turn],
                    self.group,
                    self.ledger,
                    Point.DP_GRAD,
                    self.sharded,
                )
            )

    def finish(self) -> None:
        """Launches what was not launched yet, waits for all, and leaves the sums in the buckets."""
        for index in range(len(self.buckets)):
            self.mark_ready(index)
        for bucket, rounds in zip(self.buckets, self._in_flight, strict=True):
            total = rounds.wait().total
            if total.data_ptr() != bucket.data_ptr():
                bucket.copy_(total)
        self._ready = [False] * len(self.buckets)
        self._in_flight = []

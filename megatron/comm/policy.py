"""Which compressor serves which traffic: a pure function, so that two ends can never disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.comm.points import Point
from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.registry import Registry


@dataclass(frozen=True)
class Position:
    """Everything a decision about one pipeline message may depend on; both of its ends know it.

    Args:
        iteration: training iteration, 0-based; -1 in evaluation.
        boundary: number of the boundary between two virtual stages: that of the earlier one.
        micro_batch: number of the micro-batch within the step.
        num_micro_batches: micro-batches of the step.
    """

    iteration: int
    boundary: int
    micro_batch: int
    num_micro_batches: int


class CompressionPlan:
    """The compressor of each point.

    Args:
        names: compressor by point; a point that is not named sends its traffic as it is.
        registry: where the names are looked up.

    Raises:
        KeyError: for an unknown name.
        ValueError: for a compressor that cannot serve its point.
    """

    def __init__(self, names: Mapping[Point, str], registry: Registry) -> None:
        self._entries = {point: registry[names.get(point, "none")] for point in Point}

    def rounds(self, point: Point) -> RoundCompressor:
        """A new compressor for sums at a point."""
        entry = self._entries[point]
        if entry.rounds is None:
            raise ValueError(f"{point.value} sums over ranks; its compressor only sends from one rank to another")
        return entry.rounds(entry.config())

    def codec(self, point: Point) -> Codec:
        """A new codec for messages at a point."""
        entry = self._entries[point]
        if entry.codec is None:
            raise ValueError(f"{point.value} sends from rank to rank; its compressor only sums over ranks")
        return entry.codec(entry.config())

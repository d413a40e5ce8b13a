"""Keeps the tied embedding equal on the first and the last stage by summing its gradients."""

from __future__ import annotations

from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.points import Point
from megatron.comm.rounds import RoundsInFlight
from megatron.compression.api import RoundCompressor
from megatron.compression.state import CompressorState
from megatron.topology.group import Group


class EmbeddingSync:
    """Sums the tied embedding's gradient over its two holders, after the data-parallel reduction.

    The embedding has a bucket of its own on both stages, so with the sharded optimizer both hold the same share
    of it and only that share is exchanged.
    """

    def __init__(self, group: Group, compressor: RoundCompressor, ledger: Ledger) -> None:
        self.group = group
        self.compressor = compressor
        self.ledger = ledger
        self.state = CompressorState()

    def all_reduce(self, grad: Tensor) -> None:
        """Sums ``grad`` (flat, contiguous) over the group, in place."""
        total = (
            RoundsInFlight(self.compressor, grad, self.state, self.group, self.ledger, Point.EMBED_GRAD).wait().total
        )
        if total.data_ptr() != grad.data_ptr():
            grad.copy_(total)

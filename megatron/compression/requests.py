"""What a compressor asks to have communicated, and the group that communicates."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from megatron.compression.options import CompressorFault


class Op(enum.Enum):
    """The collective that a request asks for."""

    REDUCE = "reduce"
    """All-reduce: sum the tensor over the group, in place."""
    GATHER = "gather"
    """All-gather: concatenate the tensors of all ranks along a new first dimension."""
    BROADCAST = "broadcast"
    """Broadcast: overwrite the tensor by the first rank's."""
    EXCHANGE = "exchange"
    """All-to-all: send row i of the tensor to rank i; row i of the result comes from rank i."""
    COLLECT = "collect"
    """Gather: the first rank gets the tensors of all along a new first dimension, which has no rows on the others."""
    DISTRIBUTE = "distribute"
    """Overwrite the tensor by the first rank's, which it sends to every other one itself."""


class Level(enum.Enum):
    """The ranks of the group that take part in a request."""

    ALL = "all"
    """All of them."""
    NODE = "node"
    """Those of this rank's node."""
    ACROSS = "across"
    """Those at this rank's place in its node, one on each node."""


@dataclass(frozen=True)
class Request:
    """A collective that a compressor asks for.

    Args:
        tensor: contiguous tensor to communicate; REDUCE, BROADCAST and DISTRIBUTE work in place.
        op: what to do with it.
        shard_only: this rank will read only its own equal share of the sum (the sharded optimizer's case), so
            a reduce-scatter may serve a REDUCE. Elements outside the share are then undefined.
        level: the ranks that take part. Results are in the order of ``Peers.members``, and rows go to them in that
            order. Others than ALL need ``SumTraits.levels``.
    """

    tensor: Tensor
    op: Op = Op.REDUCE
    shard_only: bool = False
    level: Level = Level.ALL


@dataclass(frozen=True)
class Peers:
    """The group that reduces.

    Args:
        rank, size: this rank's place in it, and its size.
        nodes: the ranks of the group by node, as many of each and alike in all groups of the point; empty where the
            compressor does not declare ``SumTraits.levels``, and at the tensor-parallel points.
        sharded: each rank reads only its own equal share of the flattened result, if the size divides it. Elements
            outside the share may be anything then.
    """

    rank: int
    size: int
    nodes: tuple[tuple[int, ...], ...] = ()
    sharded: bool = False

    def members(self, level: Level) -> tuple[int, ...]:
        """The ranks of the group that take part in this rank's requests at a level, ascending.

        Raises:
            CompressorFault: when the nodes are not known.
        """
        if level is Level.ALL:
            return tuple(range(self.size))
        node = next((ranks for ranks in self.nodes if self.rank in ranks), None)
        if node is None:
            raise CompressorFault(
                f"a compressor asks for Level.{level.name} where there are no node groups; it must declare "
                "SumTraits(levels=True), and look at Peers.nodes first"
            )
        return node if level is Level.NODE else tuple(sorted(ranks[node.index(self.rank)] for ranks in self.nodes))

"""Communication requests of compressors, and the group that serves them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from megatron.compression.options import CompressorFault


class Op(enum.Enum):
    """Collective operation of a request."""

    REDUCE = "reduce"
    """All-reduce: sum the tensor over the group, in place."""
    GATHER = "gather"
    """All-gather: concatenate the tensors of all ranks along a new first dimension."""
    BROADCAST = "broadcast"
    """Broadcast: overwrite the tensor with the first rank's."""
    EXCHANGE = "exchange"
    """All-to-all: send row i of the tensor to rank i; row i of the result comes from rank i."""
    COLLECT = "collect"
    """Gather: stack all ranks' tensors along a new first dimension on the first rank; empty on the other ranks."""
    DISTRIBUTE = "distribute"
    """Overwrite the tensor with the first rank's, by direct sends from the first rank to every other rank."""


class Level(enum.Enum):
    """The ranks of the group that take part in a request."""

    ALL = "all"
    """All ranks."""
    NODE = "node"
    """The ranks on this rank's node."""
    ACROSS = "across"
    """The ranks with this rank's local rank, a single rank on each node."""


@dataclass(frozen=True)
class Request:
    """A collective requested by a compressor.

    Args:
        tensor: contiguous tensor to communicate; REDUCE, BROADCAST and DISTRIBUTE work in place.
        op: the collective.
        shard_only: this rank will read only its equal share of the sum (with the sharded optimizer), so a
            reduce-scatter may serve a REDUCE. Elements outside the share are then undefined.
        level: the ranks that take part. Rows are sent, and results ordered, in the order of ``Peers.members``. NODE and
            ACROSS need ``SumTraits.levels``.
    """

    tensor: Tensor
    op: Op = Op.REDUCE
    shard_only: bool = False
    level: Level = Level.ALL


@dataclass(frozen=True)
class Peers:
    """The group of a reduction.

    Args:
        rank, size: this rank's index in the group, and the size of the group.
        nodes: ranks of the group by node, equally many on each node, in the same arrangement for all groups of the
            point; empty unless the compressor declares ``SumTraits.levels``, and at the tensor-parallel points.
        sharded: each rank reads only its equal share of the flattened result, if the size divides it. Elements outside
            the share are then undefined.
    """

    rank: int
    size: int
    nodes: tuple[tuple[int, ...], ...] = ()
    sharded: bool = False

    def members(self, level: Level) -> tuple[int, ...]:
        """Group ranks that take part in this rank's requests at a level, ascending.

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

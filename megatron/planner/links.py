"""Measurement of the links between ranks, by round trips of messages between neighbors."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.topology import Topology

SIDES = ("inside", "across")
"""Kinds of links: inside nodes and between them."""

_MESSAGE_SECONDS, _MESSAGE_BYTES = 0.05, 1 << 26
"""Minimum time or minimum size of the message that measures a link's bandwidth: it reaches one of the two."""

_FIRST_BYTES, _MAX_GROWTH = 1 << 17, 16
"""Size of the first message, and maximum ratio of the sizes of consecutive messages."""


def measure_links(topology: Topology, ranks_per_node: int) -> dict[str, float]:
    """Measure latency and bandwidth of the links.

    Args:
        topology: the mesh of all ranks.
        ranks_per_node: ranks that share a node.

    Returns:
        inside_us, inside_gbit, across_us and across_gbit for the links that exist; NaN on a rank without a peer.
    """
    rates: dict[str, float] = {}
    nodes = topology.layout.world_size // ranks_per_node
    for name, stride, count in (("inside", 1, ranks_per_node), ("across", ranks_per_node, nodes)):
        # Neighbors are paired in two ways, so that every link between neighbors is measured.
        for shift in range(min(count - 1, 2)):
            peer = find_peer(topology.rank, stride, count, shift)
            latency, nbytes = _ping_pong(topology, peer, 8, 20), _FIRST_BYTES
            while True:
                pair_s = _ping_pong(topology, peer, nbytes, 1)
                # All ranks must agree on when a message is long enough: the slowest pair decides.
                rows = gather_rows(topology.control, Ledger(), [pair_s])
                next_bytes = next_message_bytes(nbytes, max(row[0] for row in rows if row[0] == row[0]))
                if next_bytes == nbytes:
                    break
                nbytes = next_bytes
            flows = stride if name == "across" else 1
            gbit = flows * 8 * nbytes / max(pair_s - latency, 1e-9) / 1e9
            # Keep the slower of both links; fmax and fmin ignore the NaN of a rank without a peer.
            rates[f"{name}_us"] = float(np.fmax(rates.get(f"{name}_us", math.nan), latency * 1e6))
            rates[f"{name}_gbit"] = float(np.fmin(rates.get(f"{name}_gbit", math.nan), gbit))
    return rates


def find_peer(rank: int, stride: int, count: int, shift: int) -> int | None:
    """Find the peer with which a rank measures a link; None if there is none.

    Args:
        rank: the rank.
        stride: distance of the peers: 1 inside nodes, and the ranks of a node between nodes.
        count: number of ranks in a node, or of nodes.
        shift: 0 to pair the first with the second, the third with the fourth, ...; 1 to pair the second with the third.
    """
    index = rank // stride % count
    peer_index = index + 1 if (index - shift) % 2 == 0 else index - 1
    return rank + (peer_index - index) * stride if 0 <= peer_index < count else None


def next_message_bytes(nbytes: int, seconds: float) -> int:
    """Size of the message after one of ``nbytes`` that took ``seconds``: the same if that was long enough, else at
    least twice the size, chosen so that it is unlikely to take longer than twice ``_MESSAGE_SECONDS``."""
    if seconds >= _MESSAGE_SECONDS:
        return nbytes
    growth = 2
    while growth < _MAX_GROWTH and growth * seconds < _MESSAGE_SECONDS:
        growth *= 2
    return min(nbytes * growth, _MESSAGE_BYTES)


def _ping_pong(topology: Topology, peer: int | None, nbytes: int, count: int) -> float:
    """Seconds of a message between this rank and its peer, started by the lower rank; NaN without a peer."""
    world, rank = topology.world, topology.rank
    x = torch.zeros(nbytes, dtype=torch.uint8, device=topology.device)
    topology.control.barrier()
    start = time.perf_counter()
    for turn in range(0 if peer is None else 2 * count):
        assert peer is not None
        sends = (rank < peer) == (turn % 2 == 0)
        (world.send if sends else world.recv)(x, peer).wait()
    if topology.device.type == "cuda":
        torch.cuda.synchronize()
    return math.nan if peer is None else (time.perf_counter() - start) / (2 * count)

"""Clipping of each replica's gradient before the all-reduce, for compressors whose noise would distort the norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron.compression.points import Point
from megatron.distributed.ledger import Ledger
from megatron.distributed.topology import Topology
from megatron.kernels.ops import sum_of_squares
from megatron.parallel.data.buffer import FlatBuffer


def clip_replica(
    buffers: Sequence[FlatBuffer],
    topology: Topology,
    ledger: Ledger,
    max_norm: float,
    scale: float,
) -> None:
    """Scale the gradients of this rank's replica down to an L2 norm of ``max_norm`` over all its stages and shards.

    A replica's gradient is the mean over its samples. The stages' parts of a tied embedding's gradient are not reduced
    yet and count separately. Norms that are not finite clip nothing: such a step is skipped.

    Args:
        buffers: local gradients, as parts of a mean over all replicas, times ``scale``.
        topology, ledger: groups of this rank, and ledger that counts the bytes.
        max_norm: maximum norm, above zero.
        scale: the loss scale.
    """
    squares = torch.zeros(topology.dp.size, dtype=torch.float64, device=topology.device)
    grads = [
        buffer.reduced_flat[slot.start : slot.stop]
        for buffer in buffers
        for bucket in buffer.buckets
        for slot in bucket.slots
        if slot.spec.counted_by(topology.tp.rank)
    ]
    squares[topology.dp.rank] = sum_of_squares(grads)
    ledger.complete(Point.CONTROL, topology.world.all_reduce(squares))
    grad_sq = float(squares[topology.dp.rank])
    if not math.isfinite(grad_sq):
        return
    norm = math.sqrt(grad_sq) * topology.dp.size / scale
    if norm > max_norm:
        for buffer in buffers:
            buffer.reduced_flat.mul_(max_norm / (norm + 1e-6))

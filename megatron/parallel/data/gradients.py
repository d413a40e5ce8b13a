"""From local gradients to final ones: everything between the last backward and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.comm.embedding import EmbeddingSync
from megatron.comm.ledger import Ledger
from megatron.comm.points import Point
from megatron.comm.policy import CompressionPlan
from megatron.comm.reducer import GradReducer
from megatron.parallel.data.buffer import Bucket, BucketKind, FlatBuffer
from megatron.topology.group import Group
from megatron.topology.topology import Topology


class GradientSync:
    """Makes the gradients of all chunks final.

    Args:
        buffers: one per chunk.
        topology: who reduces with whom.
        plan: the compressors.
        ledger: where the bytes are counted.
        sharded: each rank needs only its own share of every bucket.
        overlap: launch buckets during backward.
        reduce: False when something else averages over replicas (torch's DistributedDataParallel).
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        topology: Topology,
        plan: CompressionPlan,
        ledger: Ledger,
        sharded: bool,
        overlap: bool,
        reduce: bool = True,
    ) -> None:
        self.buffers = buffers
        self.group = topology.dp
        self.tp = topology.tp
        self.ledger = ledger
        self.sharded = sharded
        self.overlap = overlap and self.group.size > 1 and reduce
        self.reduce = reduce
        self.reducers = [
            GradReducer(
                [buffer.grads_of(bucket) for bucket in buffer.buckets],
                self.group,
                plan.rounds(Point.DP_GRAD),
                ledger,
                sharded,
            )
            for buffer in buffers
        ]
        self.embedding = None
        if topology.embedding is not None:
            self.embedding = EmbeddingSync(topology.embedding, plan.rounds(Point.EMBED_GRAD), ledger)

    def before_last_backward(self, chunk: int) -> None:
        """The coming backward completes the chunk's gradients."""
        if not self.overlap:
            return
        buffer, reducer = self.buffers[chunk], self.reducers[chunk]

        def full(index: int) -> None:
            if buffer.buckets[index].kind is BucketKind.PLAIN:
                reducer.mark_ready(index)

        buffer.notify_when_full(full)

    def finish(self) -> None:
        """Leaves final gradients in the buckets (with ``sharded``: in this rank's shares)."""
        self._sum_partial()
        if self.group.size > 1 and self.reduce:
            for reducer in self.reducers:
                reducer.finish()
        if self.embedding is not None:
            for buffer in self.buffers:
                for bucket in buffer.buckets:
                    if bucket.kind is BucketKind.TIED:
                        grads = buffer.grads_of(bucket)
                        self.embedding.all_reduce(grads[own_share(bucket, self.group, self.sharded)])

    def _sum_partial(self) -> None:
        """Sums the sequence parts' shares of replicated parameters' gradients over tensor-parallel ranks."""
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                if bucket.kind is BucketKind.PARTIAL and self.tp.size > 1:
                    pending = self.tp.all_reduce(buffer.grads_of(bucket))
                    self.ledger.sent(Point.TP_BWD, pending.sent_bytes)
                    with self.ledger.waiting(Point.TP_BWD):
                        pending.wait()


def own_share(bucket: Bucket, group: Group, sharded: bool) -> slice:
    """This rank's part of a bucket, relative to its start: an equal share when sharded, else all of it."""
    length = bucket.stop - bucket.start
    if not sharded:
        return slice(0, length)
    share = length // group.size
    return slice(group.rank * share, (group.rank + 1) * share)


def overlap_slots(bucket: Bucket, share: slice) -> list[tuple[int, int, int]]:
    """(slot index, start, stop) of each parameter's elements within a share, relative to the parameter."""
    low, high = bucket.start + share.start, bucket.start + share.stop
    parts = []
    for index, slot in enumerate(bucket.slots):
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            parts.append((index, start - slot.start, stop - slot.start))
    return parts


def bucket_elements(requested: int | None, overlap: bool, dp: int) -> int | None:
    """Size at which buckets are closed: as asked, else 1 M elements a replica but at least 40 M, or no limit.

    Without overlap nothing is gained by cutting.
    """
    if requested is not None:
        return requested
    return max(40_000_000, 1_000_000 * dp) if overlap else None


def main_grad_dtype(params_dtype: torch.dtype, accumulate_in_fp32: bool) -> torch.dtype:
    """Dtype of the gradient buffers."""
    return torch.float32 if accumulate_in_fp32 and params_dtype.itemsize < 4 else params_dtype

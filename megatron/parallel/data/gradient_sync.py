"""The reduction of gradients: everything between the last backward and the optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron.compression.points import Point
from megatron.compression.state import CompressorState, combine_keys
from megatron.distributed.group import Group, Pending
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.parallel.data.buffer import Bucket, BucketKind, FlatBuffer, ParamSlot
from megatron.parallel.data.clipping import clip_replica
from megatron.parallel.data.controllers import Controllers, ReducedPoint
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from megatron.parallel.data.sync_warmup import SyncWarmup, alone
from megatron.parallel.data.tied_embedding import EmbeddingSync
from megatron.parallel.data.trial import TriedReduction, tried_bucket, tried_embedding


@dataclass(frozen=True)
class TiedEmbedding:
    """This rank's copy of an embedding held by several stages, and the all-reduce of its gradient over them."""

    buffer: FlatBuffer
    bucket: Bucket
    sync: EmbeddingSync

    @property
    def slot(self) -> ParamSlot:
        """The parameter."""
        return self.bucket.slots[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part of the embedding."""
        return tuple(self.slot.param.shape)


class GradientSync:
    """Reduces the gradients of all chunks.

    Args:
        buffers: buffers of the chunks, each with the replicas that reduce it.
        topology: the other groups.
        plan: the compressors.
        ledger: where the bytes are counted.
        sharded: each rank needs only its own share of every bucket.
        overlap: launch buckets during backward.
        reduce: False when something else reduces over replicas (torch's DistributedDataParallel).
        clip_grad: maximum L2 norm of a replica's gradient if the compressor needs clipping beforehand; 0 for no limit.
        joint: the joint steps of all islands.
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
        clip_grad: float = 0.0,
        joint: SyncWarmup | None = None,
    ) -> None:
        self.joint = alone() if joint is None else joint
        self.buffers = buffers
        self.topology = topology
        self.clip_grad = clip_grad
        self.group = topology.dp
        self.tp = topology.tp
        self.world = topology.world
        self.plan = plan
        self.ledger = ledger
        self.sharded = sharded
        self.overlap = overlap and self.group.size > 1 and reduce
        self.reduce = reduce
        fused = plan.fused_embedding and topology.layout.pp > 1
        self.ties = list(self._find_ties(fused))
        self.reducers = [
            GradReducer(
                [reduced_bucket(buffer, bucket, fused) for bucket in buffer.buckets],
                buffer.group,
                plan,
                ledger,
                sharded,
            )
            for buffer in buffers
        ]
        layout = topology.layout
        sizes = (layout.tp, layout.pp, layout.dp, layout.ep, *([layout.tp] if layout.folded else []))
        self.controllers = Controllers(plan, self._reduced_points(), topology.control, ledger, sizes)
        self._iteration = 0
        self._scale = 1.0
        self._asks = False
        self._shares = sharded

    def _find_ties(self, fused: bool) -> Iterator[TiedEmbedding]:
        groups = self.topology.fused_embedding if fused else self.topology.embedding
        replicas = self.topology.dp.size if fused else 1
        buckets = [(buffer, bucket) for buffer in self.buffers for bucket in buffer.buckets]
        for tie, group in groups.items():  # in an order that all holders share
            for buffer, bucket in buckets:
                if bucket.slots[0].spec.tied is tie:
                    yield TiedEmbedding(buffer, bucket, EmbeddingSync(group, self.plan, self.ledger, replicas))

    def _reduced_points(self) -> list[Point]:
        """Points at which gradients are reduced in this run; the same on every rank."""
        replicas = self.group.size > 1 and self.reduce
        stages = self.topology.layout.pp > 1
        return [point for point, on in ((Point.DP_GRAD, replicas), (Point.EMBED_GRAD, stages)) if on]

    def begin_step(self, iteration: int, scale: float) -> None:
        """Begins a step; its gradients carry the loss scale ``scale``."""
        self._iteration, self._scale = iteration, scale
        # Islands in step sum shares of the gradients, which replicas then exchange. A fused embedding is whole.
        adds = self.joint.active and not self.joint.compressed
        self._shares = self.sharded or (adds and not self.plan.fused_embedding)
        # Decided for the whole mesh, not for this stage: all ranks ask, or none.
        points = (point for point in (Point.DP_GRAD, Point.EMBED_GRAD) if self.plan.on(point, iteration))
        self._asks = any(self.plan.rounds(point).finalizes for point in points)
        # The residual of the islands' compressor must not absorb a gradient that is not finite.
        self._asks |= self.joint.active and self.joint.compressed
        for reducer in self.reducers:
            reducer.sharded = self._shares
            reducer.begin_step(iteration, scale, self._asks)
        for tied in self.ties:
            tied.sync.begin_step(iteration)

    def launch_signature(self) -> list[Hashable]:
        """Launch signatures of the kernels that each chunk's buckets launch during backward."""
        in_backward = self.overlap and not self.clips_first
        return [
            combine_keys(number, reducer.launch_signature())
            for number, reducer in enumerate(self.reducers)
            if in_backward
        ]

    def states(self) -> Iterator[CompressorState]:
        """States of the gradients' compressors."""
        for reducer in self.reducers:
            for units in reducer.units:
                yield from (unit.state for unit in units)
        for tied in self.ties:
            yield tied.sync.state

    @property
    def wants_update(self) -> bool:
        """Whether a compressor asks for the optimizer's update of this step; the same on all replicas."""
        embeddings = any(tied.sync.wants_update for tied in self.ties)
        return embeddings or any(reducer.wants_update for reducer in self.reducers)

    @property
    def freezes_variance(self) -> bool:
        """Whether this step's gradients must leave the optimizer's second moments as they are."""
        return self.group.size > 1 and self.reduce and any(reducer.freezes_variance for reducer in self.reducers)

    @property
    def clips_first(self) -> bool:
        """Whether each replica's gradient is clipped instead of the reduced gradient."""
        return self.group.size > 1 and self.reduce and any(reducer.clips_first for reducer in self.reducers)

    def observe_update(self) -> None:
        """Shows compressors the update that the optimizer left in the buckets (in own shares, when sharded)."""
        if self.sharded:
            for buffer in self.buffers:
                for bucket in buffer.buckets:
                    grads = buffer.grads_of(bucket)
                    pending = buffer.group.all_gather(grads, grads[own_share(bucket, buffer.group, True)])
                    self.ledger.sent(Point.DP_GRAD, pending.sent_bytes, 0)
                    self.ledger.wait_for(Point.DP_GRAD, pending)
        for reducer in self.reducers:
            if reducer.wants_update:
                reducer.observe()
        for tied in self.ties:
            if tied.sync.wants_update:
                tied.sync.observe(tied.buffer.grads_of(tied.bucket), tied.shape)

    def before_last_backward(self, chunk: int) -> None:
        """Announces that the coming backward completes the chunk's gradients."""
        if not self.overlap or self.clips_first:
            return  # a norm needs all gradients
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if buffer.chunk == chunk and self._reduces(buffer):
                buffer.notify_when_full(partial(_launch_full, buffer, reducer))

    def finish_reduction(self, counted: float) -> bool:
        """Leaves reduced gradients in the buckets (with ``sharded``: in this rank's shares).

        Args:
            counted: number of items that count in the losses of this rank; zero if another rank reports them.

        Returns:
            False if a compressor with state had to know whether the step can be taken, and it cannot: a gradient of
            some rank is not finite, or nothing counts. The buckets are then undefined. True says nothing about steps in
            which no compressor had to know.
        """
        for buffer in self.buffers:
            buffer.complete_grads()
        self._all_reduce_partial()
        self.controllers.before_reduction(self._iteration)
        if self.clips_first and self.clip_grad > 0:
            clip_replica(self.buffers, self.topology, self.ledger, self.clip_grad, self._scale)
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if self._reduces(buffer):
                reducer.launch()
            else:
                for untouched in reducer.buckets:
                    reducer.record_finite(untouched.flat)
        all_finite = not self._asks or self._agree_all_finite(counted)
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if self._reduces(buffer):
                reducer.finish_reduction(all_finite)
        for tied in self.ties if all_finite else ():
            share = tied.buffer.grads_of(tied.bucket)[own_share(tied.bucket, self.group, self._shares)]
            tied.sync.all_reduce(share, tied.shape, self._scale)
        if self.joint.active and not self.joint.compressed and all_finite:
            self._add_islands()
        self.controllers.after_reduction(self._iteration, self._scale, all_finite, self._reduced)
        return all_finite

    def _add_islands(self) -> None:
        """Sums the reduced gradients over islands. Each number crosses once: each replica contributes a share, and of
        the stages that hold a tied embedding only the first contributes."""
        buckets = [(buffer, bucket) for buffer in self.buffers for bucket in buffer.buckets]
        bucket_grads = [buffer.grads_of(bucket) for buffer, bucket in buckets]
        shares = [
            grads[own_share(bucket, b.group, True)] for grads, (b, bucket) in zip(bucket_grads, buckets, strict=True)
        ]
        ties = [bucket.slots[0].spec.tied for _, bucket in buckets]
        holders = [None if tie is None else self.topology.embedding.get(tie) for tie in ties]
        contributed_shares = [
            share for share, stages in zip(shares, holders, strict=True) if stages is None or stages.rank == 0
        ]
        self.joint.all_reduce(contributed_shares, Point.OUTER)
        for (buffer, _), grads, share, stages in zip(buckets, bucket_grads, shares, holders, strict=True):
            if stages is not None:
                self._hand_on(stages.broadcast(share), Point.EMBED_GRAD)
            if not self.sharded:
                self._hand_on(buffer.group.all_gather(grads, share), Point.DP_GRAD)

    def _hand_on(self, pending: Pending, point: Point) -> None:
        """Waits for the exchange of islands' sums inside this island."""
        self.ledger.sent(point, pending.sent_bytes, 0)
        self.ledger.wait_for(point, pending)

    def _reduced(self, point: Point) -> ReducedPoint:
        """The reduced gradients of a point: all of this rank's, or those of the tied embeddings."""
        buckets = [(buffer, bucket) for buffer in self.buffers for bucket in buffer.buckets]
        point_buckets = [(tied.buffer, tied.bucket) for tied in self.ties] if point is Point.EMBED_GRAD else buckets
        return ReducedPoint(
            [
                buffer.grads_of(bucket)[own_share(bucket, buffer.group, self.sharded)]
                for buffer, bucket in point_buckets
            ],
            [tuple(slot.param.shape) for _, bucket in point_buckets for slot in bucket.slots if slot.param.dim() > 1],
            self._tried_embeddings if point is Point.EMBED_GRAD else self._tried_buckets,
        )

    def _reduces(self, buffer: FlatBuffer) -> bool:
        """Whether there are replicas to reduce a buffer's gradients with."""
        return self.reduce and buffer.group.size > 1

    def _tried_buckets(self, plan: CompressionPlan) -> Iterator[TriedReduction]:
        """Data-parallel reductions of copies, by another plan."""
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            for bucket in reducer.buckets if self._reduces(buffer) else ():
                if not bucket.skipped:
                    yield tried_bucket(bucket, buffer.group, plan, self.ledger, self.sharded, self._scale)

    def _tried_embeddings(self, plan: CompressionPlan) -> Iterator[TriedReduction]:
        """All-reduces of copies of the tied embeddings' gradients, by another plan."""
        for tied in self.ties:
            share = tied.buffer.grads_of(tied.bucket)[own_share(tied.bucket, self.group, self.sharded)]
            yield tried_embedding(share, tied.shape, tied.sync, plan, self._scale)

    def _agree_all_finite(self, counted: float) -> bool:
        """Whether all local gradients of all ranks are finite and something counts in a loss."""
        bad = torch.stack([1.0 - reducer.finite() for reducer in self.reducers]).sum()
        pair = torch.stack([bad, torch.full_like(bad, counted)])
        pending = self.world.all_reduce(pair)
        self.ledger.sent(Point.CONTROL, pending.sent_bytes)
        self.ledger.wait_for(Point.CONTROL, pending)
        self.joint.all_reduce([pair])
        bad_count, all_counted = pair.tolist()
        return bad_count == 0 and all_counted > 0

    def _all_reduce_partial(self) -> None:
        """All-reduces partial gradients of replicated parameters over tensor-parallel ranks (sequence parallelism)."""
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                if bucket.slots[0].spec.partial_grad and self.tp.size > 1:
                    pending = self.tp.all_reduce(buffer.grads_of(bucket))
                    self.ledger.sent(Point.TP_BWD, pending.sent_bytes)
                    self.ledger.wait_for(Point.TP_BWD, pending)


def _launch_full(buffer: FlatBuffer, reducer: GradReducer, index: int) -> None:
    """Launches a bucket filled by backward, unless it needs another reduction first."""
    if buffer.buckets[index].kind in (BucketKind.PLAIN, BucketKind.REPLICATED):
        reducer.mark_ready(index)


def reduced_bucket(buffer: FlatBuffer, bucket: Bucket, fused_embedding: bool) -> GradBucket:
    """Converts a bucket for the reducer."""
    places = tuple(
        ParamRange(slot.logical_name, slot.start - bucket.start, tuple(slot.param.shape)) for slot in bucket.slots
    )
    return GradBucket(buffer.grads_of(bucket), places, fused_embedding and bucket.kind is BucketKind.TIED)


def own_share(bucket: Bucket, group: Group, sharded: bool) -> slice:
    """This rank's part of a bucket, relative to its start: an equal share when sharded, else all of it."""
    return share_of(bucket, group.size, group.rank) if sharded else share_of(bucket, 1, 0)


def share_of(bucket: Bucket, size: int, rank: int) -> slice:
    """A replica's part of a bucket, relative to its start."""
    share = (bucket.stop - bucket.start) // size
    return slice(rank * share, (rank + 1) * share)


def overlap_slots(bucket: Bucket, share: slice) -> list[tuple[int, int, int]]:
    """(slot index, start, stop) of each parameter's elements within a share, relative to the parameter."""
    low, high = bucket.start + share.start, bucket.start + share.stop
    overlaps = []
    for index, slot in enumerate(bucket.slots):
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            overlaps.append((index, start - slot.start, stop - slot.start))
    return overlaps


def bucket_elements(requested: int | None, overlap: bool, dp: int) -> int | None:
    """Size at which buckets are closed: as requested, else 1 M elements per replica but at least 40 M, or no limit.

    Without overlap there is no limit.
    """
    if requested is not None:
        return requested
    return max(40_000_000, 1_000_000 * dp) if overlap else None


def main_grad_dtype(params_dtype: torch.dtype, accumulate_in_fp32: bool) -> torch.dtype:
    """Dtype of the gradient buffers."""
    return torch.float32 if accumulate_in_fp32 and params_dtype.itemsize < 4 else params_dtype

"""Reduction of gradients: all communication between the last backward and the optimizer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron.compression.points import Point
from megatron.compression.state import CompressorState, combine_keys, end_states
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.kernels.ops import finite_norm
from megatron.parallel.data.buffer import Bucket, BucketKind, FlatBuffer, ParamSlot
from megatron.parallel.data.clipping import clip_replica
from megatron.parallel.data.controllers import Controllers, ReducedPoint
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from megatron.parallel.data.sync_warmup import SyncWarmup, no_sync_warmup
from megatron.parallel.data.tied_embedding import EmbeddingSync
from megatron.parallel.data.trial import TrialReduction, make_bucket_trial, make_embedding_trial


@dataclass(frozen=True)
class TiedEmbedding:
    """This rank's copy of a tied embedding, and the all-reduce of its gradient over the stages with a copy."""

    buffer: FlatBuffer
    bucket: Bucket
    sync: EmbeddingSync

    @property
    def slot(self) -> ParamSlot:
        """The parameter."""
        return self.bucket.slots[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard of the embedding."""
        return tuple(self.slot.param.shape)


@dataclass(frozen=True)
class ReducedGradients:
    """Properties of the reduced gradients that the buckets hold.

    Args:
        iteration: 0-based number of the step that computed them.
        loss_scale: the loss scale in them.
        finite: False if a check before the reduction has failed.
        clipped: whether each replica's gradient was clipped before the reduction.
        freezes_variance: whether they must leave the optimizer's second moments unchanged.
        needs_update: whether a compressor needs the optimizer's update; the same on all replicas.
    """

    iteration: int
    loss_scale: float
    finite: bool = True
    clipped: bool = False
    freezes_variance: bool = False
    needs_update: bool = False


class GradientSync:
    """Reduction of the gradients of all chunks.

    Args:
        buffers: buffers of all chunks.
        topology: this rank's groups.
        plan: plan with the compressors.
        ledger: ledger that counts the bytes.
        sharded: whether each rank needs only its share of every bucket.
        overlap: whether to launch buckets during backward.
        reduce: False if torch's DistributedDataParallel reduces over replicas instead.
        clip_grad: maximum L2 norm of a replica's gradient for compressors that need clipped input; 0 for no limit.
        sync_warmup: synchronous steps of all islands.
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
        sync_warmup: SyncWarmup | None = None,
    ) -> None:
        self.sync_warmup = no_sync_warmup() if sync_warmup is None else sync_warmup
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
        layout = topology.layout
        fused = plan.fused_embedding and bool(layout.ties)
        self._buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        self.ties = [  # in the same order on all stages
            TiedEmbedding(buffer, bucket, EmbeddingSync(group, plan, ledger, topology.dp.size if fused else 1))
            for tie, group in (topology.fused_embedding if fused else topology.embedding).items()
            for buffer, bucket in self._buckets
            if bucket.slots[0].spec.tied is tie
        ]
        self.reducers = [
            GradReducer(
                [make_grad_bucket(buffer, bucket, fused) for bucket in buffer.buckets],
                buffer.group,
                plan,
                ledger,
                sharded,
            )
            for buffer in buffers
        ]
        sizes = (layout.tp, layout.pp, layout.dp, layout.ep, *([layout.tp] if layout.folded else []))
        points = [Point.DP_GRAD] if self.group.size > 1 and reduce else []  # the same on every rank
        points += [Point.EMBED_GRAD] if layout.ties else []
        self.controllers = Controllers(plan, points, topology.control, ledger, sizes)
        self._iteration = 0
        self._scale = 1.0
        self._checks_finite = False
        self._reduces_shares = sharded

    def begin_step(self, iteration: int, scale: float, checked: bool = False) -> None:
        """Begin a step. ``scale`` is the loss scale of its gradients; if ``checked``, they are finite on all ranks."""
        self._iteration, self._scale = iteration, scale
        # In synchronous steps, islands sum shares of the gradients, and replicas then all-gather the sums. A fused
        # embedding is not divided into shares.
        sums_islands = self.sync_warmup.active and not self.sync_warmup.compressed
        self._reduces_shares = self.sharded or (sums_islands and not self.plan.fused_embedding)
        self._checks_finite = self.needs_finite(iteration)
        # A gradient that is not finite must not enter the residual of the islands' compressor.
        self._checks_finite |= self.sync_warmup.active and self.sync_warmup.compressed
        self._checks_finite &= not checked
        for reducer in self.reducers:
            reducer.sharded = self._reduces_shares
            reducer.begin_step(iteration, scale, self._checks_finite)
        for tied in self.ties:
            tied.sync.begin_step(iteration)

    def needs_finite(self, iteration: int) -> bool:
        """Whether a compressor must not see gradients of this step that are not finite; the same on all ranks."""
        # Independent of the stage, so that either all ranks check or none.
        points = (point for point in (Point.DP_GRAD, Point.EMBED_GRAD) if self.plan.is_active(point, iteration))
        return any(self.plan.rounds(point).finalizes for point in points)

    def launch_signature(self) -> list[Hashable]:
        """Launch signatures of the kernels that buckets launch during backward, by chunk."""
        in_backward = self.overlap and not self.clips_first
        return [
            combine_keys(number, reducer.launch_signature())
            for number, reducer in enumerate(self.reducers)
            if in_backward
        ]

    def states(self) -> Iterator[CompressorState]:
        """Compressor states of all gradients."""
        for reducer in self.reducers:
            yield from reducer.states()
        for tied in self.ties:
            yield tied.sync.state

    @property
    def needs_update(self) -> bool:
        """Whether a compressor needs this step's optimizer update; the same on all replicas."""
        embeddings = any(tied.sync.needs_update for tied in self.ties)
        return embeddings or any(reducer.needs_update for reducer in self.reducers)

    @property
    def freezes_variance(self) -> bool:
        """Whether this step must not change the optimizer's second moments."""
        return self.group.size > 1 and self.reduce and any(reducer.freezes_variance for reducer in self.reducers)

    @property
    def clips_first(self) -> bool:
        """Whether this step clips each replica's gradient instead of the reduced gradient."""
        return self.group.size > 1 and self.reduce and any(reducer.clips_first for reducer in self.reducers)

    def observe_update(self) -> None:
        """Pass the optimizer's update, which the buckets (with ``sharded``, local shares) now hold, to compressors."""
        if self.sharded:
            for buffer, bucket in self._buckets:
                grads = buffer.grads_of(bucket)
                pending = buffer.group.all_gather(grads, grads[local_share(bucket, buffer.group, True)])
                self.ledger.complete(Point.DP_GRAD, pending, 0)
        for reducer in self.reducers:
            if reducer.needs_update:
                reducer.observe()
        for tied in self.ties:
            if tied.sync.needs_update:
                tied.sync.observe(tied.buffer.grads_of(tied.bucket), tied.shape)

    def begin_last_backward(self, chunk: int) -> None:
        """Prepare to launch buckets during the last backward of a chunk."""
        if not self.overlap or self.clips_first:
            return  # a norm needs all gradients
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if buffer.chunk == chunk and self._has_replicas(buffer):
                buffer.notify_when_full(partial(_launch_filled_bucket, buffer, reducer))

    def reduce_gradients(self, counted: float) -> ReducedGradients:
        """Reduce the gradients after the last backward of a step.

        Args:
            counted: number of items in this rank's losses; 0 if another rank reports them.

        Returns:
            The reduced gradients. They are not ``finite``, and the buckets are undefined, if the step checks for finite
            gradients and a gradient on some rank is not finite or the losses have no items.
        """
        self.complete_gradients()
        self.launch_reduction()
        all_finite = True
        if self._checks_finite:
            bad = torch.stack([1.0 - reducer.finite() for reducer in self.reducers]).sum()
            pair = torch.stack([bad, torch.full_like(bad, counted)])
            self.ledger.complete(Point.CONTROL, self.world.all_reduce(pair))
            self.sync_warmup.all_reduce([pair])
            bad_count, all_counted = pair.tolist()
            all_finite = bad_count == 0 and all_counted > 0
        return self.finish_reduction(all_finite)

    def complete_gradients(self) -> None:
        """Complete this rank's gradients after the last backward of a step, by sums over tensor-parallel ranks."""
        for buffer in self.buffers:
            buffer.complete_grads()
        for buffer, bucket in self._buckets:
            if bucket.slots[0].spec.partial_grad and self.tp.size > 1:
                partial_grads = buffer.grads_flat[bucket.start : bucket.stop]
                self.ledger.complete(Point.TP_BWD, self.tp.all_reduce(partial_grads))

    def launch_reduction(self) -> None:
        """Launch the reduction of the buckets that backward has not launched."""
        self.controllers.before_reduction(self._iteration)
        if self.clips_first and self.clip_grad > 0:
            clip_replica(self.buffers, self.topology, self.ledger, self.clip_grad, self._scale)
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if self._has_replicas(buffer):
                reducer.launch_all()
            else:
                for local in reducer.buckets:
                    reducer.record_finite(local.flat)

    def advance_reduction(self) -> None:
        """Run the rounds of a launched reduction whose messages have arrived, in the same order on all ranks."""
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if self._has_replicas(buffer) and not reducer.advance():
                return

    def finish_reduction(self, all_finite: bool) -> ReducedGradients:
        """Complete a reduction: the buckets (with ``sharded``, this rank's shares) then hold reduced gradients.

        Args:
            all_finite: whether the gradients of all ranks are finite; if not, the buckets are undefined.
        """
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            if self._has_replicas(buffer):
                reducer.finish_reduction(all_finite)
        for tied in self.ties if all_finite else ():
            share = tied.buffer.grads_of(tied.bucket)[local_share(tied.bucket, self.group, self._reduces_shares)]
            tied.sync.all_reduce(share, tied.shape, self._scale)
        if self.sync_warmup.active and not self.sync_warmup.compressed and all_finite:
            self._sum_over_islands()
        self.controllers.after_reduction(self._iteration, self._scale, all_finite, self._collect_reduced)
        return ReducedGradients(
            self._iteration,
            self._scale,
            all_finite,
            clipped=self.clips_first,
            freezes_variance=self.freezes_variance,
            needs_update=self.needs_update,
        )

    def reduced_are_finite(self) -> bool:
        """Whether the reduced gradients are finite on all ranks. A collective call."""
        shares = [
            buffer.grads_of(bucket)[local_share(bucket, buffer.group, self._reduces_shares)]
            for buffer, bucket in self._buckets
        ]
        num_bad = torch.stack([1.0 - finite_norm(share)[1] for share in shares]).sum()
        self.ledger.complete(Point.CONTROL, self.world.all_reduce(num_bad))
        return float(num_bad) == 0.0

    def end_step(self, keep_states: bool) -> None:
        """Commit the compressors' states, or roll them back because no update was taken."""
        end_states(self.states(), keep_states)

    def _sum_over_islands(self) -> None:
        """Sum the reduced gradients over islands. Each element is sent only once: each replica sends a share, and only
        the first stage sends a tied embedding."""
        bucket_grads = [buffer.grads_of(bucket) for buffer, bucket in self._buckets]
        shares = [
            grads[local_share(bucket, buffer.group, True)]
            for grads, (buffer, bucket) in zip(bucket_grads, self._buckets, strict=True)
        ]
        ties = [bucket.slots[0].spec.tied for _, bucket in self._buckets]
        holders = [None if tie is None else self.topology.embedding.get(tie) for tie in ties]
        contributed_shares = [
            share for share, stages in zip(shares, holders, strict=True) if stages is None or stages.rank == 0
        ]
        self.sync_warmup.all_reduce(contributed_shares, Point.OUTER)
        for (buffer, _), grads, share, stages in zip(self._buckets, bucket_grads, shares, holders, strict=True):
            if stages is not None:
                self.ledger.complete(Point.EMBED_GRAD, stages.broadcast(share), 0)
            if not self.sharded:
                self.ledger.complete(Point.DP_GRAD, buffer.group.all_gather(grads, share), 0)

    def _collect_reduced(self, point: Point) -> ReducedPoint:
        """Collect the reduced gradients of a point."""
        of_ties = point is Point.EMBED_GRAD
        buckets = [(tied.buffer, tied.bucket) for tied in self.ties] if of_ties else self._buckets
        return ReducedPoint(
            [buffer.grads_of(bucket)[local_share(bucket, buffer.group, self.sharded)] for buffer, bucket in buckets],
            [tuple(slot.param.shape) for _, bucket in buckets for slot in bucket.slots if slot.param.dim() > 1],
            self._make_embedding_trials if of_ties else self._make_bucket_trials,
        )

    def _has_replicas(self, buffer: FlatBuffer) -> bool:
        """Whether a buffer's gradients are reduced over replicas here."""
        return self.reduce and buffer.group.size > 1

    def _make_bucket_trials(self, plan: CompressionPlan) -> Iterator[TrialReduction]:
        """Make trial reductions of copies of the buckets under another plan."""
        for buffer, reducer in zip(self.buffers, self.reducers, strict=True):
            for bucket in reducer.buckets if self._has_replicas(buffer) else ():
                if not bucket.skipped:
                    yield make_bucket_trial(bucket, buffer.group, plan, self.ledger, self.sharded, self._scale)

    def _make_embedding_trials(self, plan: CompressionPlan) -> Iterator[TrialReduction]:
        """Make trial reductions of copies of the tied embeddings' gradients under another plan."""
        for tied in self.ties:
            share = tied.buffer.grads_of(tied.bucket)[local_share(tied.bucket, self.group, self.sharded)]
            yield make_embedding_trial(share, tied.shape, tied.sync, plan, self._scale)


def _launch_filled_bucket(buffer: FlatBuffer, reducer: GradReducer, index: int) -> None:
    """Launch a bucket that backward has filled, unless its gradients need another reduction first."""
    if buffer.buckets[index].kind in (BucketKind.PLAIN, BucketKind.REPLICATED):
        reducer.mark_ready(index)


def make_grad_bucket(buffer: FlatBuffer, bucket: Bucket, fused_embedding: bool) -> GradBucket:
    """Convert a bucket to the reducer's form."""
    ranges = tuple(
        ParamRange(slot.logical_name, slot.start - bucket.start, tuple(slot.param.shape)) for slot in bucket.slots
    )
    return GradBucket(buffer.grads_of(bucket), ranges, fused_embedding and bucket.kind is BucketKind.TIED)


def local_share(bucket: Bucket, group: Group, sharded: bool) -> slice:
    """This rank's share of a bucket, relative to its start; the whole bucket if not ``sharded``."""
    return replica_share(bucket, group.size, group.rank) if sharded else replica_share(bucket, 1, 0)


def replica_share(bucket: Bucket, size: int, rank: int) -> slice:
    """Share of a replica in a bucket, relative to the bucket's start."""
    share = (bucket.stop - bucket.start) // size
    return slice(rank * share, (rank + 1) * share)


def overlap_slots(bucket: Bucket, share: slice) -> list[tuple[int, int, int]]:
    """(slot index, start, stop) of each parameter's elements within a share, relative to the parameter's start."""
    low, high = bucket.start + share.start, bucket.start + share.stop
    overlaps = []
    for index, slot in enumerate(bucket.slots):
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            overlaps.append((index, start - slot.start, stop - slot.start))
    return overlaps


def bucket_elements(requested: int | None, overlap: bool, dp: int) -> int | None:
    """Minimum bucket size: the requested size, else 1 M elements per replica and at least 40 M. None for a single
    bucket, the default without overlap."""
    if requested is not None:
        return requested
    return max(40_000_000, 1_000_000 * dp) if overlap else None


def main_grad_dtype(params_dtype: torch.dtype, accumulate_in_fp32: bool) -> torch.dtype:
    """Dtype of the gradient buffers."""
    return torch.float32 if accumulate_in_fp32 and params_dtype.itemsize < 4 else params_dtype

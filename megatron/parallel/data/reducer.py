"""Bucketed reduction through a compressor: units of compression, and rounds of communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.compression.api import RoundCompressor
from megatron.compression.approximation import write
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.round_driver import PackedReduction, TensorReduction


@dataclass(frozen=True)
class ParamRange:
    """Position of a parameter's gradient in its bucket.

    Args:
        name: logical name of the parameter.
        start: index of the first element.
        shape: shape of the parameter on this rank.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Index past the last element."""
        return self.start + math.prod(self.shape)


@dataclass
class GradBucket:
    """Gradients that are reduced together.

    Args:
        flat: gradients, contiguous.
        ranges: ranges of the parameters, in order, with equal shapes next to each other.
        skipped: whether the bucket is not reduced here but with the fused embedding.
    """

    flat: Tensor
    ranges: tuple[ParamRange, ...] = ()
    skipped: bool = False


@dataclass
class ParamStack:
    """Unit of compression: a stack of parameters of equal shape, or a whole bucket.

    Args:
        ranges: adjacent ranges of the bucket; empty for a whole bucket.
        state: compressor state of the unit.

    Raises:
        ValueError: when the ranges are not adjacent.
    """

    ranges: tuple[ParamRange, ...] = ()
    state: CompressorState = field(default_factory=CompressorState)

    def __post_init__(self) -> None:
        for before, after in itertools.pairwise(self.ranges):
            if before.stop != after.start:
                raise ValueError(f"{before.name} and {after.name} are not adjacent in their bucket")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of each parameter; None for a whole bucket."""
        return self.ranges[0].shape if self.ranges else None

    def view(self, flat: Tensor) -> Tensor:
        """View of the unit in the bucket: (k, *shape), or the whole bucket."""
        if not self.ranges:
            return flat
        return flat[self.ranges[0].start : self.ranges[-1].stop].view(len(self.ranges), *self.ranges[0].shape)

    def unscaled_view(self, flat: Tensor, scale: float) -> Tensor:
        """Unscaled gradients in fp32 or fp64; a view of the bucket if the bucket's dtype is fp32 or fp64."""
        gradients = self.view(flat)
        x = gradients if gradients.dtype == torch.float64 else gradients.float()
        return x if scale == 1.0 else x.mul_(1.0 / scale)

    def write_back(self, flat: Tensor, x: Tensor, scale: float) -> None:
        """Scale the reduced gradients ``x``, the tensor of ``unscaled_view``, and write them to the bucket."""
        write(x if scale == 1.0 else x.mul_(scale), self.view(flat))


@dataclass
class PendingBucket:
    """Pending reduction of a bucket.

    Args:
        reduction: the pending reduction; None for a skipped bucket.
        units: compressed units; ``reduction.reductions`` begins with theirs, in the same order.
    """

    reduction: PackedReduction | None
    units: list[ParamStack]


class BucketReducer:
    """All-reduce or reduce-scatter of buckets over a group, through a point's compressor.

    Compressors receive views of the buckets, and reduced values replace local values in place. Subclasses decide when
    to launch buckets and when to write results.

    Args:
        buckets: buckets to reduce; with ``sharded``, each length is a multiple of the group size.
        group: ranks of the reduction.
        plan: plan with the point's compressor.
        ledger: ledger that counts the bytes.
        sharded: whether each rank needs only its share of the result, as after a reduce-scatter.
        point: point of the reduction.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        group: Group,
        plan: CompressionPlan,
        ledger: Ledger,
        sharded: bool,
        point: Point,
    ) -> None:
        self.point = point
        self.buckets = buckets
        self.group = group
        self.plan = plan
        self.ledger = ledger
        self.sharded = sharded
        self.units = [self._make_units(bucket) for bucket in buckets]
        self._active = False
        self._scale = 1.0
        self._pending: list[PendingBucket] = []

    @property
    def compressor(self) -> RoundCompressor:
        """Compressor with this iteration's options."""
        return self.plan.rounds(self.point)

    def states(self) -> Iterator[CompressorState]:
        """Compressor states of all units."""
        return (unit.state for units in self.units for unit in units)

    def _make_units(self, bucket: GradBucket) -> list[ParamStack]:
        """Make the compressed units of a bucket. Parameters outside the units are reduced exactly."""
        if not self.plan.covers(self.point, self.plan.stage) or bucket.skipped:
            return []
        if not self.compressor.traits.batched:
            return [ParamStack()]
        shapes: dict[tuple[int, ...], list[ParamRange]] = {}
        for param in bucket.ranges:
            if self.plan.ever_compresses(self.point, param.shape):
                shapes.setdefault(param.shape, []).append(param)
        return [ParamStack(tuple(ranges)) for ranges in shapes.values()]

    def _select_units(self, units: Sequence[ParamStack]) -> list[tuple[ParamStack, RoundCompressor]]:
        """Select a bucket's units that are compressed in this step, with their compressors."""
        if not self._active:
            return []
        selected = ((unit, self.plan.select_compressor(self.point, unit.shape, unit.state)) for unit in units)
        return [(unit, compressor) for unit, compressor in selected if compressor is not None]

    def residuals(self) -> Iterator[tuple[list[str], CompressorState]]:
        """Parameter names and compressor state of each unit."""
        for bucket, units in zip(self.buckets, self.units, strict=True):
            for unit in units:
                names = [param.name for param in unit.ranges or bucket.ranges]
                if not unit.ranges and len(names) > 1:
                    names = [f"{names[0]} ... {names[-1]}"]
                yield names, unit.state

    def _launch(self, bucket: GradBucket, units: Sequence[ParamStack]) -> PendingBucket:
        if bucket.skipped:
            return PendingBucket(None, [])
        selected = self._select_units(units)
        compressed_units = [unit for unit, _ in selected]
        with self.ledger.encoding(self.point):
            reductions = [
                TensorReduction(c, unit.unscaled_view(bucket.flat, self._scale), unit.state) for unit, c in selected
            ]
        reductions += [
            TensorReduction(IdentityRounds(), bucket.flat[span], CompressorState())
            for span in _uncompressed_ranges(bucket, compressed_units)
        ]
        raw = (1 if self.sharded else 2) * (self.group.size - 1) * bucket.flat.nbytes // self.group.size
        # Stacks are not aligned with the ranks' shares of the bucket, so every rank needs the complete sums.
        shares = self.sharded and not any(unit.ranges for unit in compressed_units)
        packed = PackedReduction(reductions, self.group, self.ledger, self.point, shares, raw_bytes=raw)
        return PendingBucket(packed, compressed_units)

    def _pending_buckets(self) -> list[tuple[GradBucket, PendingBucket]]:
        """Buckets with pending reductions."""
        return [pair for pair in zip(self.buckets, self._pending, strict=True) if pair[1].reduction is not None]

    def _advance_bucket(self, pending: PendingBucket, finite: bool) -> bool:
        """Run a round of a bucket's reduction and any intra-node rounds after it; return whether rounds remain."""
        reduction = pending.reduction
        assert reduction is not None
        if not finite:
            reduction.abandon()
            pending.reduction = None
            return False
        reduction.advance()
        return reduction.advance_inside_nodes()

    def _finish_bucket(self, bucket: GradBucket, pending: PendingBucket) -> None:
        """Finish a bucket's reduction and write the reduced gradients to the bucket, unless it was abandoned."""
        if pending.reduction is None:
            return
        pending.reduction.finish()
        with self.ledger.decoding(self.point):
            for unit, reduced in zip(pending.units, pending.reduction.reductions, strict=False):
                unit.write_back(bucket.flat, reduced.x, self._scale)


def _uncompressed_ranges(bucket: GradBucket, units: Sequence[ParamStack]) -> list[slice]:
    """Ranges of a bucket outside the compressed units."""
    if not units:
        return [slice(0, bucket.flat.numel())]
    if any(not unit.ranges for unit in units):
        return []
    compressed = {param.start for unit in units for param in unit.ranges}
    spans: list[slice] = []
    for param in bucket.ranges:
        if param.start in compressed:
            continue
        adjoins = bool(spans) and spans[-1].stop == param.start
        spans.append(slice(spans.pop().start if adjoins else param.start, param.stop))
    return spans

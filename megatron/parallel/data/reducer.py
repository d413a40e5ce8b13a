"""Bucketed reduction: of gradients over replicas, overlapped with backward, and of pseudo-gradients over islands."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.compression.api import RoundCompressor
from megatron.compression.approximation import write
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState, combine_keys
from megatron.distributed.group import Group, num_bytes
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.round_driver import PackedReduction, TensorReduction
from megatron.kernels.ops import finite_norm


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
        flat: the gradients, contiguous.
        places: the parameters in the bucket, in order; equal shapes are adjacent.
        skipped: the bucket is reduced elsewhere (fused embedding).
    """

    flat: Tensor
    ranges: tuple[ParamRange, ...] = ()
    skipped: bool = False


@dataclass
class ParamStack:
    """Unit of compression: a stack of equally shaped parameters of a bucket, or a whole bucket.

    Args:
        places: the parameters, adjacent in the bucket; empty for a whole bucket.
        state: the compressor's state for the unit.

    Raises:
        ValueError: when the parameters are not adjacent.
    """

    ranges: tuple[ParamRange, ...] = ()
    state: CompressorState = field(default_factory=CompressorState)

    def __post_init__(self) -> None:
        for before, after in itertools.pairwise(self.ranges):
            if before.stop != after.start:
                raise ValueError(f"{before.name} and {after.name} do not lie one behind the other in their bucket")

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
        """The unit's unscaled gradients in fp32 or fp64; they share the bucket's memory if the dtype allows."""
        gradients = self.view(flat)
        x = gradients if gradients.dtype == torch.float64 else gradients.float()
        return x if scale == 1.0 else x.mul_(1.0 / scale)

    def write_back(self, flat: Tensor, x: Tensor, scale: float) -> None:
        """Write the reduced gradients ``x``, in the memory of ``unscaled_view``, back to the bucket."""
        write(x if scale == 1.0 else x.mul_(scale), self.view(flat))


@dataclass
class _PendingBucket:
    """A bucket whose reduction is pending.

    Args:
        reduction: the pending reduction; None for a bucket that is reduced elsewhere.
        units: the compressed units, in the order of the first reductions.
    """

    reduction: PackedReduction | None
    units: list[ParamStack]


class GradReducer:
    """All-reduce (or reduce-scatter) of buckets over a group, launched as they become ready.

    Buckets are launched in list order, regardless of the order in which they become ready, so that every rank issues
    its collectives in the same order by construction. Nothing is copied: compressors receive views of the buckets, and
    the reduced gradients replace the local gradients in place.

    Args:
        buckets: the buckets; with ``sharded``, each length is a multiple of the group size.
        group: the data-parallel ranks.
        plan: the compressor of the point, shared by all buckets, and its activation.
        ledger: ledger that counts the bytes.
        sharded: each rank needs only its own share of the result, as after a reduce-scatter.
        point: point of the reduction: gradients (``DP_GRAD``) or pseudo-gradients (``OUTER``).
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        group: Group,
        plan: CompressionPlan,
        ledger: Ledger,
        sharded: bool,
        point: Point = Point.DP_GRAD,
    ) -> None:
        self.point = point
        self.buckets = buckets
        self.group = group
        self.plan = plan
        self.ledger = ledger
        self.sharded = sharded
        self.units = [self._units(bucket) for bucket in buckets]
        self._on = False
        self._scale = 1.0
        self._checks = False
        self._ready = [False] * len(buckets)
        self._pending: list[_PendingBucket] = []
        self._finite: list[Tensor] = []
        self._turns: deque[_PendingBucket] = deque()

    @property
    def compressor(self) -> RoundCompressor:
        """The compressor, with this iteration's options."""
        return self.plan.rounds(self.point)

    def _units(self, bucket: GradBucket) -> list[ParamStack]:
        """Compressed units of a bucket; parameters in no unit are reduced exactly."""
        if not self.plan.covers(self.point, self.plan.stage) or bucket.skipped:
            return []
        if not self.compressor.traits.batched:
            return [ParamStack()]
        shapes: dict[tuple[int, ...], list[ParamRange]] = {}
        for param in bucket.ranges:
            if self.plan.ever_compresses(self.point, param.shape):
                shapes.setdefault(param.shape, []).append(param)
        return [ParamStack(tuple(places)) for places in shapes.values()]

    def begin_step(self, iteration: int, scale: float, checks: bool = False, early: bool = False) -> None:
        """Begin a step.

        Args:
            iteration: 0-based.
            scale: the loss scale of the gradients.
            checks: check whether the local gradients are finite (``finite``).
            early: compress even before the end of the point's warm-up.
        """
        self._on = early or self.plan.on(self.point, iteration)
        self._scale = scale
        self._checks = checks
        self._finite = []

    def launch_signature(self) -> Hashable:
        """Launch signature of the kernels that a ready bucket launches."""
        used = [(index, *pair) for index, units in enumerate(self.units) for pair in self._used(units)]
        launches = combine_keys(*(compressor.launches(unit.state) for _, unit, compressor in used))
        if launches is None:
            return None
        compressed_units = tuple((index, unit.shape, type(compressor)) for index, unit, compressor in used)
        options = self.plan.options(self.point) if self._on else None
        return self.point, options, self._scale == 1.0, self._checks, compressed_units, launches

    def _used(self, units: Sequence[ParamStack]) -> list[tuple[ParamStack, RoundCompressor]]:
        """Units of a bucket that are compressed in this step, with the compressor of each."""
        serving = ((unit, self.plan.serving(self.point, unit.shape, unit.state)) for unit in units if self._on)
        return [(unit, compressor) for unit, compressor in serving if compressor is not None]

    def residuals(self) -> Iterator[tuple[list[str], CompressorState]]:
        """Parameter names (of a stack or a whole bucket) and state of each unit."""
        for bucket, units in zip(self.buckets, self.units, strict=True):
            for unit in units:
                names = [param.name for param in unit.ranges]
                bucket_names = [param.name for param in bucket.ranges]
                yield (
                    names
                    or [bucket_names[0] if len(bucket_names) == 1 else f"{bucket_names[0]} ... {bucket_names[-1]}"],
                    unit.state,
                )

    @property
    def wants_update(self) -> bool:
        """Whether the compressor needs the optimizer's update of this step."""
        states = (unit.state for units in self.units for unit in units)
        return self._on and self.compressor.traits.observes and any(state.count("awaiting") for state in states)

    @property
    def freezes_variance(self) -> bool:
        """Whether this step's reduced gradients are too noisy to update the optimizer's second moments."""
        return self._on and self.compressor.traits.freezes_variance

    @property
    def clips_first(self) -> bool:
        """Whether this step clips the local gradients instead of the reduced gradients."""
        return self._on and self.compressor.traits.clips_first

    def observe(self) -> None:
        """Pass the optimizer's update, which has replaced the gradients in the buckets, to the compressor."""
        for bucket, units in zip(self.buckets, self.units, strict=True):
            for unit in units:
                self.compressor.observe(unit.unscaled_view(bucket.flat, 1.0), unit.state)

    def mark_ready(self, index: int) -> None:
        """Mark the local gradient of bucket ``index`` as final, and launch all buckets that are next in order.

        By then the intra-node rounds of the previous bucket have had time to complete, and its inter-node round starts.
        """
        self._ready[index] = True
        while len(self._pending) < len(self.buckets) and self._ready[len(self._pending)]:
            if self._pending and (before := self._pending[-1].reduction) is not None:
                before.advance_inside_nodes()
            self._pending.append(self._launch(self.buckets[len(self._pending)], self.units[len(self._pending)]))

    def launch(self) -> None:
        """Launch the remaining buckets: all local gradients are final."""
        for index in range(len(self.buckets)):
            self.mark_ready(index)

    def record_finite(self, flat: Tensor) -> None:
        """Record whether a local gradient is finite, if the step checks gradients."""
        if self._checks:
            with self.ledger.encoding(self.point):
                self._finite.append(finite_norm(flat)[1])

    def finite(self) -> Tensor:
        """1 if all checked local gradients are finite, else 0."""
        none = self.buckets[0].flat.new_ones((), dtype=torch.float64)
        return torch.stack([none, *self._finite]).amin()

    def _launch(self, bucket: GradBucket, units: Sequence[ParamStack]) -> _PendingBucket:
        self.record_finite(bucket.flat)
        if bucket.skipped:
            return _PendingBucket(None, [])
        serving = self._used(units)
        used = [unit for unit, _ in serving]
        with self.ledger.encoding(self.point):
            reductions = [
                TensorReduction(c, unit.unscaled_view(bucket.flat, self._scale), unit.state) for unit, c in serving
            ]
        reductions += [
            TensorReduction(IdentityRounds(), bucket.flat[span], CompressorState())
            for span in _uncompressed_ranges(bucket, used)
        ]
        raw = (1 if self.sharded else 2) * (self.group.size - 1) * num_bytes(bucket.flat) // self.group.size
        # Stacks do not align with the ranks' shares of the bucket, so every rank needs all sums.
        shares = self.sharded and not any(unit.ranges for unit in used)
        packed = PackedReduction(reductions, self.group, self.ledger, self.point, shares, raw_bytes=raw)
        return _PendingBucket(packed, used)

    def finish_reduction(self, finite: bool = True) -> None:
        """Wait for all buckets and leave the reduced gradients in them; their contents are undefined if not ``finite``.

        Buckets take turns, a round each, so that coding a bucket hides the messages of the others. Intra-node rounds
        take no separate turn, so that a bucket completes while other messages are still in flight between nodes; its
        final decoding follows the next bucket's turn, so that it does not delay that bucket's message.
        """
        self.launch()
        active = self._under_way()
        finished: list[tuple[GradBucket, _PendingBucket]] = []
        while active:
            remaining: list[tuple[GradBucket, _PendingBucket]] = []
            for bucket, pending in active:
                has_more = self._advance(pending, finite)
                while finished:
                    self._end(*finished.pop())
                (remaining if has_more else finished).append((bucket, pending))
            active = remaining
        while finished:
            self._end(*finished.pop())
        self._forget()

    def _under_way(self) -> list[tuple[GradBucket, _PendingBucket]]:
        """Buckets with a pending reduction."""
        return [pair for pair in zip(self.buckets, self._pending, strict=True) if pair[1].reduction is not None]

    def _forget(self) -> None:
        self._ready = [False] * len(self.buckets)
        self._pending = []
        self._turns.clear()

    def exchange(self, wait: bool = True) -> bool:
        """Run all rounds of all buckets, which take turns. Results take effect only in ``write_results``.

        Args:
            wait: False advances only as far as possible without blocking; all ranks still start collectives in the
                same order.

        Returns:
            Whether all rounds have completed.
        """
        if len(self._pending) < len(self.buckets):
            self.launch()
            self._turns.extend(pending for _, pending in self._under_way())
        while self._turns:
            first = self._turns[0]
            assert first.reduction is not None
            if not wait and not first.reduction.arrived():
                return False
            self._turns.popleft()
            if self._advance(first, True):
                self._turns.append(first)
        return True

    def squared_norm(self) -> float:
        """Squared norm of the result of ``exchange``; buckets and states are unchanged."""
        return sum(pending.reduction.squared_norm() for pending in self._pending if pending.reduction is not None)

    def write_results(self) -> None:
        """Write the result of ``exchange`` to the buckets, and commit the compressors' states."""
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            self._end(bucket, pending)
        self._forget()
        for state in self.states():
            state.commit()

    def drop(self) -> None:
        """Discard a reduction that failed on any rank: roll back the states; bucket contents are undefined."""
        for pending in self._pending:
            if pending.reduction is not None:
                pending.reduction.close()
        self._forget()
        for state in self.states():
            state.rollback()

    def states(self) -> Iterator[CompressorState]:
        """Compressor states of all units."""
        for units in self.units:
            yield from (unit.state for unit in units)

    def _advance(self, pending: _PendingBucket, finite: bool) -> bool:
        """Run a round of a bucket's reduction and the following intra-node rounds; return whether rounds remain."""
        reduction = pending.reduction
        assert reduction is not None
        if not finite:
            reduction.abandon()
            pending.reduction = None
            return False
        reduction.advance()
        return reduction.advance_inside_nodes()

    def _end(self, bucket: GradBucket, pending: _PendingBucket) -> None:
        """Write the reduced gradients to a bucket, unless its reduction was abandoned."""
        if pending.reduction is None:
            return
        pending.reduction.finish()
        with self.ledger.decoding(self.point):
            for unit, reduced in zip(pending.units, pending.reduction.reductions, strict=False):
                unit.write_back(bucket.flat, reduced.x, self._scale)


def _uncompressed_ranges(bucket: GradBucket, units: Sequence[ParamStack]) -> list[slice]:
    """Ranges of a bucket outside the compressed units, which are reduced exactly."""
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

"""Bucketed reduction of gradients over replicas, overlapped with backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.compression.state import combine_keys
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.kernels.ops import finite_norm
from megatron.parallel.data.reducer import BucketReducer, GradBucket, ParamStack, PendingBucket


class GradReducer(BucketReducer):
    """Reduction of gradient buckets over replicas, launched as they become ready.

    Buckets are launched in list order, regardless of the order in which they become ready, so that every rank issues
    its collectives in the same order by construction. In a step: ``begin_step``, ``mark_ready`` for buckets that
    backward has filled, ``finish_reduction``.

    Args:
        buckets, group, plan, ledger, sharded, point: see ``BucketReducer``.
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
        super().__init__(buckets, group, plan, ledger, sharded, point)
        self._checks = False
        self._ready = [False] * len(buckets)
        self._finite: list[Tensor] = []

    def begin_step(self, iteration: int, scale: float, checks: bool = False) -> None:
        """Begin a step.

        Args:
            iteration: 0-based.
            scale: the loss scale of the gradients.
            checks: check whether the local gradients are finite (``finite``).
        """
        self._on = self.plan.on(self.point, iteration)
        self._scale = scale
        self._checks = checks
        self._finite = []

    def launch_signature(self) -> Hashable:
        """Launch signature of the kernels that a ready bucket launches."""
        used = [(index, *pair) for index, units in enumerate(self.units) for pair in self._used(units)]
        signature = combine_keys(*(compressor.launch_signature(unit.state) for _, unit, compressor in used))
        if signature is None:
            return None
        compressed_units = tuple((index, unit.shape, type(compressor)) for index, unit, compressor in used)
        options = self.plan.options(self.point) if self._on else None
        return self.point, options, self._scale == 1.0, self._checks, compressed_units, signature

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

    def _launch(self, bucket: GradBucket, units: Sequence[ParamStack]) -> PendingBucket:
        self.record_finite(bucket.flat)
        return super()._launch(bucket, units)

    def finish_reduction(self, finite: bool = True) -> None:
        """Wait for all buckets and leave the reduced gradients in them; their contents are undefined if not ``finite``.

        Buckets take turns, a round each, so that coding a bucket hides the messages of the others. Intra-node rounds
        take no separate turn, so that a bucket completes while other messages are still in flight between nodes; its
        final decoding follows the next bucket's turn, so that it does not delay that bucket's message.
        """
        self.launch()
        active = self._under_way()
        finished: list[tuple[GradBucket, PendingBucket]] = []
        while active:
            remaining: list[tuple[GradBucket, PendingBucket]] = []
            for bucket, pending in active:
                has_more = self._advance(pending, finite)
                while finished:
                    self._end(*finished.pop())
                (remaining if has_more else finished).append((bucket, pending))
            active = remaining
        while finished:
            self._end(*finished.pop())
        self._ready = [False] * len(self.buckets)
        self._pending = []

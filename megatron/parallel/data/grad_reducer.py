"""Bucketed reduction of gradients over data-parallel replicas, overlapped with backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.compression.state import combine_keys
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.round_driver import PackedReduction
from megatron.kernels.ops import finite_norm
from megatron.parallel.data.reducer import BucketReducer, GradBucket, PendingBucket


class GradReducer(BucketReducer):
    """Reduction of gradient buckets over replicas, launched as they become ready.

    Buckets are launched in list order, regardless of the order in which they become ready, so that all ranks issue
    their collectives in the same order. Call order in a step: ``begin_step``, ``mark_ready`` for each bucket that
    backward has filled, ``finish_reduction``; ``advance`` in between hides later rounds, too.

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
        self._checks_finite = False
        self._ready = [False] * len(buckets)
        self._finite: list[Tensor] = []
        self._rounds: Iterator[PackedReduction] | None = None
        self._next: PackedReduction | None = None

    def begin_step(self, iteration: int, scale: float, checks: bool = False) -> None:
        """Begin a step.

        Args:
            iteration: 0-based.
            scale: loss scale of the gradients.
            checks: whether to check that the local gradients are finite (``finite``).
        """
        self._active = self.plan.is_active(self.point, iteration)
        self._scale = scale
        self._checks_finite = checks
        self._finite = []

    def launch_signature(self) -> Hashable:
        """Launch signature of the kernels that ready buckets launch."""
        selected = [(index, *pair) for index, units in enumerate(self.units) for pair in self._select_units(units)]
        signature = combine_keys(*(compressor.launch_signature(unit.state) for _, unit, compressor in selected))
        if signature is None:
            return None
        compressed_units = tuple((index, unit.shape, type(compressor)) for index, unit, compressor in selected)
        options = self.plan.options(self.point) if self._active else None
        return self.point, options, self._scale == 1.0, self._checks_finite, compressed_units, signature

    @property
    def needs_update(self) -> bool:
        """Whether a compressor needs this step's optimizer update."""
        awaiting = (state.count("awaiting") for state in self.states())
        return self._active and self.compressor.traits.observes and any(awaiting)

    @property
    def freezes_variance(self) -> bool:
        """Whether this step's reduced gradients are too noisy to update the optimizer's second moments."""
        return self._active and self.compressor.traits.freezes_variance

    @property
    def clips_first(self) -> bool:
        """Whether this step clips local instead of reduced gradients."""
        return self._active and self.compressor.traits.clips_first

    def observe(self) -> None:
        """Pass the optimizer's update, which the buckets now hold instead of gradients, to the compressor."""
        for bucket, units in zip(self.buckets, self.units, strict=True):
            for unit in units:
                self.compressor.observe(unit.unscaled_view(bucket.flat, 1.0), unit.state)

    def mark_ready(self, index: int) -> None:
        """Mark the local gradients of bucket ``index`` as final, and launch the ready buckets that are next in order.

        Before each launch, the previous bucket's inter-node round is started: its intra-node rounds have had time to
        complete.
        """
        self._ready[index] = True
        while len(self._pending) < len(self.buckets) and self._ready[len(self._pending)]:
            if self._pending and (before := self._pending[-1].reduction) is not None:
                before.advance_inside_nodes()
            bucket, units = self.buckets[len(self._pending)], self.units[len(self._pending)]
            self.record_finite(bucket.flat)
            self._pending.append(self._launch(bucket, units))

    def launch_all(self) -> None:
        """Launch the remaining buckets, after the last backward."""
        for index in range(len(self.buckets)):
            self.mark_ready(index)

    def record_finite(self, flat: Tensor) -> None:
        """Record whether local gradients are finite, if the step checks gradients."""
        if self._checks_finite:
            with self.ledger.encoding(self.point):
                self._finite.append(finite_norm(flat)[1])

    def finite(self) -> Tensor:
        """1 if all recorded local gradients are finite, else 0, as fp64."""
        one = self.buckets[0].flat.new_ones((), dtype=torch.float64)
        return torch.stack([one, *self._finite]).amin()

    def advance(self) -> bool:
        """Run the launched buckets' rounds whose messages have arrived, in the order of ``finish_reduction``.

        Returns:
            Whether all rounds have run.
        """
        if self._rounds is None:
            self._rounds = self._run_rounds(finite=True)
            self._next = next(self._rounds, None)
        while self._next is not None and not self._next.is_waiting:
            self._next = next(self._rounds, None)
        return self._next is None

    def finish_reduction(self, finite: bool = True) -> None:
        """Complete all reductions; the buckets then hold the reduced gradients, or undefined values if not ``finite``.

        Args:
            finite: whether all gradients are finite; always true after ``advance``.
        """
        self.launch_all()
        for _ in self._run_rounds(finite) if self._rounds is None else self._rounds:
            pass
        self._ready = [False] * len(self.buckets)
        self._pending = []
        self._rounds = self._next = None

    def _run_rounds(self, finite: bool) -> Iterator[PackedReduction]:
        """Run the rounds of all buckets; yield the next reduction to advance.

        The buckets advance in turn by a round, so that encoding and decoding a bucket hides the messages of others.
        Intra-node rounds do not wait for a turn, so that a bucket completes while other messages are in flight between
        nodes. A completed bucket is decoded after the next bucket's turn, which would otherwise be delayed.
        """
        active = self._pending_buckets()
        finished: list[tuple[GradBucket, PendingBucket]] = []
        while active:
            remaining: list[tuple[GradBucket, PendingBucket]] = []
            for bucket, pending in active:
                assert pending.reduction is not None
                yield pending.reduction
                has_more = self._advance_bucket(pending, finite)
                while finished:
                    self._finish_bucket(*finished.pop())
                (remaining if has_more else finished).append((bucket, pending))
            active = remaining
        while finished:
            self._finish_bucket(*finished.pop())

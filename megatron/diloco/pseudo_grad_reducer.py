"""Bucketed reduction of pseudo-gradients over islands, whose results count only once all islands agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.compression.points import Point
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.reducer import BucketReducer, GradBucket, PendingBucket


class PseudoGradReducer(BucketReducer):
    """Reduction over the members of a round: ``begin_round``, ``exchange`` until it is complete, then ``write_results``
    or ``discard``.

    Args:
        buckets, plan, ledger: see ``BucketReducer``.
    """

    def __init__(self, buckets: Sequence[GradBucket], plan: CompressionPlan, ledger: Ledger) -> None:
        super().__init__(buckets, Group(None, (0,), 0, "islands", "none"), plan, ledger, False, Point.OUTER)
        self._turns: deque[PendingBucket] = deque()

    def begin_round(self, group: Group, iteration: int, scale: float = 1.0, early: bool = False) -> None:
        """Begin a round.

        Args:
            group: this rank and the same rank of all other members.
            iteration: 0-based.
            scale: the loss scale of gradients.
            early: whether to compress even before the end of the point's warm-up.
        """
        self.group = group
        self._active = early or self.plan.is_active(self.point, iteration)
        self._scale = scale

    def exchange(self, wait: bool = True) -> bool:
        """Run all rounds of all buckets, which take turns. Results take effect only in ``write_results``.

        Args:
            wait: if False, only advance as far as possible without blocking; all ranks still start collectives in the
                same order.

        Returns:
            Whether all rounds have completed.
        """
        if len(self._pending) < len(self.buckets):
            launched = len(self._pending)
            for bucket, units in zip(self.buckets[launched:], self.units[launched:], strict=True):
                self._pending.append(self._launch(bucket, units))
            self._turns.extend(pending for _, pending in self._pending_buckets())
        while self._turns:
            first = self._turns[0]
            assert first.reduction is not None
            if not wait and not first.reduction.arrived():
                return False
            self._turns.popleft()
            if self._advance_bucket(first, True):
                self._turns.append(first)
        return True

    def squared_norm(self) -> float:
        """Squared norm of the result of ``exchange``; buckets and states are unchanged."""
        return sum(pending.reduction.squared_norm() for pending in self._pending if pending.reduction is not None)

    def write_results(self) -> None:
        """Write the result of ``exchange`` to the buckets, and commit the compressors' states."""
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            self._finish_bucket(bucket, pending)
        self._clear_pending()
        for state in self.states():
            state.commit()

    def discard(self) -> None:
        """Discard a reduction that failed on any rank: roll back the states; bucket contents are undefined."""
        for pending in self._pending:
            if pending.reduction is not None:
                pending.reduction.close()
        self._clear_pending()
        for state in self.states():
            state.rollback()

    def _clear_pending(self) -> None:
        self._pending = []
        self._turns.clear()

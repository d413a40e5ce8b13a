"""Steps that all islands take as one: data parallelism over all of them, before their first round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.compression.points import Point
from megatron.topology.errors import CommunicationError
from megatron.topology.group import Group


class JointSteps:
    """Sums over all islands in their synchronous steps; nothing in the others.

    Args:
        count: number of islands.
        steps: synchronous steps at the beginning of the run.
        group: this rank of all islands; None for a single island.
        ledger: where the bytes are counted.
        compressed: gradients are summed by the compressor of ``OUTER`` (``OuterSync.sum_gradients``), not here.
    """

    def __init__(self, count: int, steps: int, group: Group | None, ledger: Ledger, compressed: bool = False) -> None:
        self.count, self.steps, self.ledger, self.compressed = count, steps, ledger, compressed
        self._group = group
        self.on = False

    def begin(self, iteration: int) -> None:
        """Begins a step (0-based), or an evaluation (-1), which is each island's own."""
        self.on = self._group is not None and 0 <= iteration < self.steps

    @property
    def islands(self) -> int:
        """Islands that take this step as one."""
        return self.count if self.on else 1

    @property
    def group(self) -> Group:
        """This rank of all islands, in a step that they take as one."""
        assert self.on
        assert self._group is not None
        return self._group

    def add(self, tensors: list[Tensor], point: Point = Point.CONTROL) -> None:
        """Sums tensors over the islands that take this step as one, in place, bit by bit alike on all of them.

        Raises:
            CommunicationError: when an island is gone.
        """
        if not self.on:
            return
        with self.together():
            pending = [self.group.all_reduce(x) for x in tensors]
            for one in pending:
                self.ledger.sent(point, one.sent_bytes)
                self.ledger.wait(point, one)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Says what it means when communication with other islands fails in such a step.

        Raises:
            CommunicationError: when an island is gone.
        """
        try:
            yield
        except CommunicationError as error:
            raise CommunicationError(
                "an island is gone while they go in step, so this one ends, too; start all of them again from their "
                f"checkpoints ({error})"
            ) from error


def alone() -> JointSteps:
    """The steps of a run without islands."""
    return JointSteps(1, 0, None, Ledger())

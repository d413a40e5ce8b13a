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
        ledger: where the bytes are counted.
        compressed: gradients are summed by the compressor of ``OUTER`` (``OuterSync.sum_gradients``), not here.

    ``group`` is this rank of all islands, once they have met; None where they do not go in step.
    """

    def __init__(self, count: int, steps: int, ledger: Ledger, compressed: bool = False) -> None:
        self.count, self.steps, self.ledger, self.compressed = count, steps, ledger, compressed
        self.group: Group | None = None
        self.on = False

    def begin(self, iteration: int) -> None:
        """Begins a step (0-based), or an evaluation (-1), which is each island's own."""
        self.on = self.group is not None and 0 <= iteration < self.steps

    @property
    def islands(self) -> int:
        """Islands that take this step as one."""
        return self.count if self.on else 1

    def add(self, tensors: list[Tensor], point: Point = Point.CONTROL) -> None:
        """Sums tensors over the islands that take this step as one, in place, bit by bit alike on all of them.

        Raises:
            CommunicationError: when an island is gone.
        """
        if not self.on:
            return
        group = self.group
        assert group is not None
        with self.together():
            pending = [group.all_reduce(x) for x in tensors]
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
    return JointSteps(1, 0, Ledger())

"""Synchronous steps: data parallelism over all islands, before their first outer round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from megatron.compression.points import Point
from megatron.distributed.errors import CommunicationError
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger


@dataclass(eq=False)
class SyncWarmup:
    """Sums over all islands in synchronous steps; no-ops in the other steps.

    Args:
        num_islands: number of islands.
        steps: synchronous steps at the beginning of the run.
        ledger: ledger that counts the bytes.
        compressed: whether gradients are summed by the compressor of ``OUTER`` (``OuterSync.sum_gradients``), not here.

    ``group`` holds this rank and the same rank of all other islands, after the rendezvous; None without synchronous
    steps. ``active``: whether the current step is synchronous.
    """

    num_islands: int
    steps: int
    ledger: Ledger
    compressed: bool = False
    group: Group | None = None
    active: bool = False

    def begin_step(self, iteration: int) -> None:
        """Begin a step (0-based), or an evaluation (-1), which each island runs separately."""
        self.active = self.group is not None and 0 <= iteration < self.steps

    @property
    def islands_in_step(self) -> int:
        """Number of islands that share this step: all in a synchronous step, else only this one."""
        return self.num_islands if self.active else 1

    def all_reduce(self, tensors: list[Tensor], point: Point = Point.CONTROL) -> None:
        """Sum tensors over the islands in a synchronous step, in place, with bitwise identical results on all islands.

        Raises:
            CommunicationError: when an island is gone.
        """
        if not self.active:
            return
        group = self.group
        assert group is not None
        with self.explain_errors():
            pending = [group.all_reduce(x) for x in tensors]
            for communication in pending:
                self.ledger.complete(point, communication)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Add an explanation to communication errors in a synchronous step.

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


def no_sync_warmup() -> SyncWarmup:
    """``SyncWarmup`` of a run without islands."""
    return SyncWarmup(1, 0, Ledger())

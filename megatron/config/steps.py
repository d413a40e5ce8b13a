"""The sizes of a run's steps: samples, micro-batches and tokens of each, and of those to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations


@dataclass(frozen=True)
class Stretch:
    """Steps in a row whose sequences are equally long, and of which all or none are taken.

    Args:
        iterations: number of steps.
        samples: samples of all replicas.
        micro_batches: micro-batches of each replica.
        length: tokens of a sample.
        taken: whether the steps are taken; else their samples count as consumed all the same.
    """

    iterations: int
    samples: int
    micro_batches: int
    length: int
    taken: bool = True


@dataclass(frozen=True)
class StepSizes:
    """Batch sizes and sequence lengths: pure functions of the iteration and the samples consumed before it; and the
    iterations without a step."""

    batches: BatchSizeSchedule
    lengths: LengthSchedule
    skipped: SkippedIterations = field(default_factory=SkippedIterations)

    def ahead(self, iteration: int, consumed_samples: int, iterations: int) -> Iterator[Stretch]:
        """The next ``iterations`` steps from a position."""
        end = iteration + iterations
        while iteration < end:
            until = min(self.lengths.until(iteration) or end, self.skipped.until(iteration) or end, end)
            ahead = self.batches.ahead(consumed_samples, until - iteration)
            taken = iteration + 1 not in self.skipped
            yield Stretch(until - iteration, ahead.samples, ahead.micro_batches, self.lengths.at(iteration), taken)
            iteration, consumed_samples = until, consumed_samples + ahead.samples

    def tokens_ahead(self, iteration: int, consumed_samples: int, iterations: int) -> int:
        """Tokens that the next ``iterations`` steps from a position train on."""
        return sum(one.samples * one.length for one in self.ahead(iteration, consumed_samples, iterations) if one.taken)

    def within(self, tokens: int, iteration: int = 0, consumed_samples: int = 0) -> tuple[int, int]:
        """The whole steps from a position that train on no more than so many tokens.

        Returns:
            Their number, and that of their samples.
        """
        at, consumed = iteration, consumed_samples
        while True:
            length, until = self.lengths.at(at), self.lengths.until(at)
            steps = self.batches.iterations_for(consumed + tokens // length, consumed)
            if until is not None:
                steps = min(steps, until - at)
            samples = self.batches.ahead(consumed, steps).samples
            at, consumed, tokens = at + steps, consumed + samples, tokens - samples * length
            if at != until:
                return at - iteration, consumed - consumed_samples

"""Sizes of training steps: samples, micro-batches and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations


@dataclass(frozen=True)
class StepGroup:
    """Consecutive steps with the same sequence length, all taken or all skipped.

    Args:
        iterations: number of steps.
        samples: samples over all replicas.
        micro_batches: micro-batches per replica.
        length: tokens per sample.
        updates: false for skipped steps; their samples still count as consumed.
    """

    iterations: int
    samples: int
    micro_batches: int
    length: int
    updates: bool = True


@dataclass(frozen=True)
class StepSizes:
    """Batch sizes, sequence lengths and skipped iterations: functions of the iteration and the consumed samples."""

    batches: BatchSizeSchedule
    lengths: LengthSchedule
    skipped: SkippedIterations = field(default_factory=SkippedIterations)

    def ahead(self, iteration: int, consumed_samples: int, iterations: int) -> Iterator[StepGroup]:
        """Next ``iterations`` steps from a position, grouped by size."""
        end = iteration + iterations
        while iteration < end:
            until = min(self.lengths.until(iteration) or end, self.skipped.until(iteration) or end, end)
            samples = self.batches.samples_ahead(consumed_samples, until - iteration)
            is_taken = iteration + 1 not in self.skipped
            micro_batches = samples // self.batches.samples_per_micro_batch
            yield StepGroup(until - iteration, samples, micro_batches, self.lengths.at(iteration), is_taken)
            iteration, consumed_samples = until, consumed_samples + samples

    def tokens_ahead(self, iteration: int, consumed_samples: int, iterations: int) -> int:
        """Number of tokens trained in the next ``iterations`` steps from a position."""
        return sum(
            group.samples * group.length
            for group in self.ahead(iteration, consumed_samples, iterations)
            if group.updates
        )

    def steps_within(self, tokens: int, iteration: int = 0, consumed_samples: int = 0) -> tuple[int, int]:
        """Full steps from a position within a budget of tokens.

        Returns:
            Number of steps, and number of their samples.
        """
        at, consumed = iteration, consumed_samples
        while True:
            length, until = self.lengths.at(at), self.lengths.until(at)
            steps = self.batches.iterations_for(consumed + tokens // length, consumed)
            if until is not None:
                steps = min(steps, until - at)
            samples = self.batches.samples_ahead(consumed, steps)
            at, consumed, tokens = at + steps, consumed + samples, tokens - samples * length
            if at != until:
                return at - iteration, consumed - consumed_samples

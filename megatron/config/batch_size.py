"""The global batch size over a run: constant, or growing with the samples consumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import UserError


@dataclass(frozen=True)
class Ahead:
    """Size of coming steps: samples of all replicas, and micro-batches of each."""

    samples: int
    micro_batches: int


class BatchSizeSchedule:
    """Global batch size and number of micro-batches, as pure functions of the samples consumed.

    Args:
        global_batch_size: samples of one optimizer step; the final one when there is a ramp-up. None: one micro-batch
            per data-parallel rank.
        micro_batch_size: samples of one forward pass of one data-parallel rank.
        dp_size: number of data-parallel ranks.
        rampup: ``(start, increment, samples)``: from ``start``, up by ``increment`` at a time, evenly over ``samples``
            samples.

    Raises:
        UserError: when a batch size on the way does not divide by micro-batch size times dp_size; the message names the
            flag.
    """

    def __init__(
        self,
        global_batch_size: int | None,
        *,
        micro_batch_size: int,
        dp_size: int,
        rampup: Sequence[int] | None = None,
    ) -> None:
        if micro_batch_size < 1:
            raise UserError(f"--micro-batch-size {micro_batch_size} must be at least 1")
        self.samples_per_micro_batch = micro_batch_size * dp_size
        if global_batch_size is None:
            global_batch_size = self.samples_per_micro_batch
        self.global_batch_size = global_batch_size
        self.start = global_batch_size
        self.increment = self.ramp_samples = self.increments = 0
        if rampup is not None:
            self._set_rampup(rampup)
        for k in range(min(self.increments, 1) + 1):  # where these divide, all the later ones do
            self._check_divides(self.start + k * self.increment, micro_batch_size, dp_size)

    def _set_rampup(self, rampup: Sequence[int]) -> None:
        if len(rampup) != 3:
            raise UserError(f"--rampup-batch-size needs three values (start, increment, samples), got {len(rampup)}")
        self.start, self.increment, self.ramp_samples = rampup
        given = f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples}"
        if self.start < 1 or self.increment < 1 or self.ramp_samples < 0:
            raise UserError(f"{given}: start and increment must be at least 1, samples at least 0")
        if self.start > self.global_batch_size:
            raise UserError(f"{given}: the start is above --global-batch-size {self.global_batch_size}")
        self.increments, rest = divmod(self.global_batch_size - self.start, self.increment)
        if rest:
            raise UserError(
                f"{given}: the increment does not divide the way from {self.start} to "
                f"--global-batch-size {self.global_batch_size}"
            )

    def _check_divides(self, size: int, micro_batch_size: int, dp_size: int) -> None:
        if size < 1 or size % self.samples_per_micro_batch:
            where = "" if size == self.global_batch_size else " (reached by --rampup-batch-size)"
            raise UserError(
                f"--global-batch-size {size}{where} does not divide by --micro-batch-size {micro_batch_size} "
                f"x {dp_size} data-parallel ranks: take a multiple of {self.samples_per_micro_batch}"
            )

    def at(self, consumed_samples: int) -> int:
        """Global batch size of the step that begins when ``consumed_samples`` samples have been consumed."""
        if consumed_samples >= self.ramp_samples or self.increments == 0:
            return self.global_batch_size
        # In integers: dividing by a rounded samples-per-increment would be a step late at some boundaries.
        return self.start + consumed_samples * self.increments // self.ramp_samples * self.increment

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Micro-batches that each data-parallel rank runs in the step that begins there."""
        return self.at(consumed_samples) // self.samples_per_micro_batch

    def ahead(self, consumed_samples: int, iterations: int) -> Ahead:
        """Size of the next ``iterations`` steps after ``consumed_samples`` samples."""
        begin = consumed_samples
        while iterations and self.increments and consumed_samples < self.ramp_samples:
            size = self.at(consumed_samples)
            # The first number of samples at which the next size begins.
            level = (size - self.start) // self.increment + 1
            end = -(-level * self.ramp_samples // self.increments)
            steps = min(iterations, max(1, -(-(end - consumed_samples) // size)))
            consumed_samples, iterations = consumed_samples + steps * size, iterations - steps
        consumed_samples += iterations * self.global_batch_size
        samples = consumed_samples - begin
        return Ahead(samples, samples // self.samples_per_micro_batch)

    def iterations_for(self, train_samples: int, consumed: int = 0) -> int:
        """Number of whole steps from ``consumed`` samples until ``train_samples`` samples; a last partial batch is not
        run."""
        iterations = 0
        ramp = self.ramp_samples if self.increments else 0
        while consumed < ramp:
            size = self.at(consumed)
            grown = consumed * self.increments // ramp + 1
            until = min(-(-grown * ramp // self.increments), train_samples - size + 1)  # steps of this size begin below
            if until <= consumed:
                return iterations
            steps = -(-(until - consumed) // size)
            iterations += steps
            consumed += steps * size
        return iterations + max(train_samples - consumed, 0) // self.global_batch_size

"""Global batch size over a run: constant, or a function of the samples consumed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from megatron.base.errors import UserError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:E[0-9]{1,2})?)([KMBT]?)")


class BatchSizeSchedule:
    """Global batch size and number of micro-batches, as pure functions of the samples consumed.

    Args:
        global_batch_size: samples per optimizer step; the final value if it changes. None: one micro-batch per
            data-parallel rank.
        micro_batch_size: samples per forward pass of a data-parallel rank.
        dp_size: number of data-parallel ranks.
        rampup: ``(start, increment, samples)``: from ``start``, in steps of ``increment``, evenly over ``samples``
            samples.
        steps: ``(samples, size)``: each size and the number of consumed samples at which it begins; see ``read_steps``.

    ``sizes`` are the global batch sizes in order.

    Raises:
        UserError: when a batch size is not divisible by micro-batch size times dp_size; the message names the flag.
    """

    def __init__(
        self,
        global_batch_size: int | None,
        *,
        micro_batch_size: int,
        dp_size: int,
        rampup: Sequence[int] | None = None,
        steps: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if micro_batch_size < 1:
            raise UserError(f"--micro-batch-size {micro_batch_size} must be at least 1")
        self.samples_per_micro_batch = micro_batch_size * dp_size
        if global_batch_size is None:
            global_batch_size = self.samples_per_micro_batch
        self.global_batch_size = global_batch_size
        self.sizes: Sequence[int] = [global_batch_size]
        self._begin: Callable[[int], int] = lambda stage: 0
        flag = ""
        if rampup is not None:
            flag = "--rampup-batch-size"
            if len(rampup) != 3:
                raise UserError(f"{flag} needs three values (start, increment, samples), got {len(rampup)}")
            start, increment, samples = rampup
            ramp_flag = f"{flag} {start} {increment} {samples}"
            if start < 1 or increment < 1 or samples < 0:
                raise UserError(
                    f"{ramp_flag}: start and increment must be at least 1, samples at least 0; correct them"
                )
            if start > global_batch_size:
                raise UserError(f"{ramp_flag}: the start is above --global-batch-size {global_batch_size}; lower it")
            increments, remainder = divmod(global_batch_size - start, increment)
            if remainder:
                raise UserError(
                    f"{ramp_flag}: the increment does not divide the range from {start} to --global-batch-size "
                    f"{global_batch_size}; choose one that does"
                )
            self.sizes = range(start, global_batch_size + 1, increment)
            # Integer arithmetic: dividing by a rounded samples-per-increment would be a step late at some boundaries.
            self._begin = lambda stage: -(-stage * samples // max(increments, 1))
        elif steps is not None:
            begins, self.sizes = zip(*steps, strict=True)
            self._begin = begins.__getitem__
            flag = "--step-batch-size-schedule"
        for size in self.deciding_sizes:
            if size < 1 or size % self.samples_per_micro_batch:
                origin = "" if not flag or size == self.global_batch_size else f" (reached by {flag})"
                raise UserError(
                    f"--global-batch-size {size}{origin} is not divisible by --micro-batch-size {micro_batch_size} "
                    f"x {dp_size} data-parallel ranks: use a multiple of {self.samples_per_micro_batch}"
                )

    @property
    def deciding_sizes(self) -> Sequence[int]:
        """Sizes that decide divisibility: a divisor of these divides all sizes. The first two of a ramp-up."""
        return self.sizes[:2] if isinstance(self.sizes, range) else self.sizes

    def _stage(self, consumed_samples: int) -> tuple[int, int | None]:
        """Size of the step at ``consumed_samples``, and the samples at which the next size begins (None: never)."""
        stages = range(len(self.sizes))
        following = bisect_right(stages, consumed_samples, key=self._begin)
        return self.sizes[following - 1], self._begin(following) if following < len(stages) else None

    def at(self, consumed_samples: int) -> int:
        """Global batch size of the step that begins after ``consumed_samples`` samples."""
        return self._stage(consumed_samples)[0]

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Micro-batches per data-parallel rank in the step that begins after ``consumed_samples`` samples."""
        return self.at(consumed_samples) // self.samples_per_micro_batch

    def samples_ahead(self, consumed_samples: int, iterations: int) -> int:
        """Number of samples in the next ``iterations`` steps after ``consumed_samples`` samples."""
        begin = consumed_samples
        while iterations:
            size, until = self._stage(consumed_samples)
            steps = iterations if until is None else min(iterations, -(-(until - consumed_samples) // size))
            consumed_samples, iterations = consumed_samples + steps * size, iterations - steps
        return consumed_samples - begin

    def iterations_for(self, train_samples: int, consumed: int = 0) -> int:
        """Number of full steps from ``consumed`` to ``train_samples`` samples; a partial last batch is dropped."""
        iterations = 0
        while True:
            size, changes = self._stage(consumed)
            last = train_samples - size + 1  # upper bound (exclusive) for the start of a step of this size
            until = last if changes is None else min(changes, last)
            if until <= consumed:
                return iterations
            steps = -(-(until - consumed) // size)
            iterations, consumed = iterations + steps, consumed + steps * size


def read_steps(text: str, seq_length: int) -> list[tuple[int, int]]:
    """Parse ``--step-batch-size-schedule``: "THRESHOLD:SIZE" entries, separated by spaces or commas.

    Args:
        text: the entries, in any order. Numbers may end with K, M, B or T (thousands to trillions).
        seq_length: tokens per sample. Thresholds are in tokens and are rounded down to whole samples.

    Returns:
        Pairs of threshold (in samples) and batch size, sorted.

    Raises:
        UserError: when an entry cannot be parsed, no entry begins at 0, or two begin at the same sample.
    """
    flag = f"--step-batch-size-schedule {text}"
    steps = []
    for word in text.replace(",", " ").split():
        numbers = [_parse_integer(number_text) for number_text in word.split(":")]
        if len(numbers) != 2 or None in numbers or numbers[1] == 0:
            raise UserError(f"{flag}: {word} is not THRESHOLD:SIZE, such as 250B:1536; correct it")
        threshold, size = (number or 0 for number in numbers)
        steps.append((threshold // seq_length, size))
    steps.sort()
    begins = [begin for begin, _ in steps]
    if begins[:1] != [0]:
        raise UserError(f"{flag}: no size begins at 0; add one, such as 0:{steps[0][1] if steps else 256}")
    for before, begin in pairwise(begins):
        if before == begin:
            raise UserError(
                f"{flag}: two sizes begin at sample {begin} of {seq_length} tokens each; move them apart by a sample"
            )
    return steps


def _parse_integer(word: str) -> int | None:
    """Integer value of a word with an optional suffix; None if it is not an integer."""
    match = _NUMBER.fullmatch(word.upper())
    number = Fraction(match[1]) * _SUFFIXES[match[2]] if match else None
    return None if number is None or number.denominator != 1 else int(number)

"""Activation of compressors over a run, as pure functions, so that all participating ranks decide equally."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.base.parse_numbers import read_number, read_whole
from megatron.base.user_text import shortened

MAX_STAGES = 1 << 20
_MAX_EPOCHS = 1e6


@dataclass(frozen=True)
class Activation:
    """Iterations, stages and messages of a point that are compressed; all others are sent uncompressed.

    Args:
        warmup_iters: uncompressed iterations at the start of the whole run.
        first_stages, last_stages: only this many first or last pipeline stages compress (by the sender's stage); None
            for no restriction.
        epilogue: compress only messages sent back after the sender's last forward, which nothing overlaps (pipeline
            backward).
        evaluation: also compress in evaluation.
        warms_up: a warm-up was requested; its length in iterations may not be known yet.
    """

    warmup_iters: int = 0
    first_stages: int | None = None
    last_stages: int | None = None
    epilogue: bool = False
    evaluation: bool = False
    warms_up: bool = False

    def covers_stage(self, stage: int, stages: int) -> bool:
        """Whether the traffic of a pipeline stage is ever compressed."""
        if self.first_stages is not None:
            return stage < self.first_stages
        return self.last_stages is None or stage >= stages - self.last_stages

    def is_active(self, iteration: int, in_epilogue: bool = True) -> bool:
        """Whether to compress a message.

        Args:
            iteration: 0-based; -1 in evaluation.
            in_epilogue: the message belongs to the pipeline's epilogue.
        """
        if iteration < 0:
            return self.evaluation
        return iteration >= self.warmup_iters and (in_epilogue or not self.epilogue)


def read_stages(text: str) -> tuple[int | None, int | None]:
    """Parse ``all``, ``first:N`` or ``last:N`` to (first, last).

    Raises:
        UserError: for any other text.
    """
    end_name, _, number = text.partition(":")
    if text == "all":
        return None, None
    try:
        count = read_whole(number)
    except ValueError:
        count = -1
    if end_name not in ("first", "last") or count < 0:
        raise UserError(f"stages={shortened(text)}: write all, first:N or last:N")
    if not 1 <= count <= MAX_STAGES:
        raise UserError(f"stages={text}: must name at least one stage, and at most all; leave the spec out for none")
    return (count, None) if end_name == "first" else (None, count)


@dataclass(frozen=True)
class RunLength:
    """Length of a run, to resolve fractions and epochs.

    Args:
        train_iters: iterations of the run; None if its length is not given in iterations.
        iterations_of: maps a number of epochs to iterations; None without data.
    """

    train_iters: int | None = None
    iterations_of: Callable[[float], int] | None = None


_EPOCHS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*epochs?")


def read_iterations(text: str, length: RunLength, location: str) -> int:
    """Parse a number of iterations: ``500``, a fraction of the run (``0.1``), or epochs (``1epochs``).

    Args:
        text: the user's text.
        length: length of the run.
        location: prefix of error messages.

    Raises:
        UserError: for any other text, or for a fraction of a run whose length in iterations is unknown.
    """
    if text.isdecimal() and text.isascii():
        try:
            return read_whole(text)
        except ValueError as error:
            raise UserError(f"{location}: {error}") from None
    epochs = _EPOCHS.fullmatch(text)
    if epochs:
        count = float(epochs[1])
        if count > _MAX_EPOCHS:
            raise UserError(f"{location}: at most {_MAX_EPOCHS:g} epochs")
        return 0 if length.iterations_of is None else length.iterations_of(count)
    try:
        fraction = read_number(text)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise UserError(
            f"{location}: write a number of iterations, a fraction of the run such as 0.1, or epochs such as 1epochs"
        )
    if length.train_iters is None:
        if fraction == 0.0:
            return 0
        raise UserError(f"{location}: a fraction needs --train-iters; write a number of iterations instead")
    return int(fraction * length.train_iters)


@dataclass(frozen=True)
class Schedule:
    """A number that changes over the run, in steps or along a ramp.

    Args:
        steps: (first iteration, value) in order, the first from iteration 0.
        ramp: (from, to, n): geometrically within the n iterations after the compressor's warm-up; its k-th value is
            from (to / from) ^ ((k + 1) / (n + 1)), as Lin et al. 2018 (section 3.4) let a density fall.
        integral: the ramp's values are rounded to whole numbers.
    """

    steps: tuple[tuple[int, float], ...] = ()
    ramp: tuple[float, float, int] | None = None
    integral: bool = False

    def at(self, iteration: int, warmup: int = 0) -> float:
        """Value at an iteration (0-based), for a compressor that is on from iteration ``warmup``."""
        if self.ramp is not None:
            start, end, length = self.ramp
            done = min(max(iteration - warmup, 0) + 1, length + 1) / (length + 1)
            value = end if done == 1.0 else start * (end / start) ** done
            return float(round(value)) if self.integral else value
        return [value for first, value in self.steps if first <= iteration][-1]

    @property
    def values(self) -> tuple[float, ...]:
        """Values of the steps, or the ends of the ramp."""
        return self.ramp[:2] if self.ramp is not None else tuple(value for _, value in self.steps)

    @property
    def extremes(self) -> tuple[float, float]:
        """Lowest and highest value."""
        return min(self.values), max(self.values)


_MIN_VALUE, _MAX_VALUE = 1e-30, 1e30
"""Bounds of the ends of a ramp; their quotient is finite, too."""


def read_schedule(text: str, length: RunLength) -> Schedule:
    """Parse a schedule of steps (``64@0/32@1000/8@0.5``: value@iteration, fraction of the run, or epochs) or a ramp
    (``1~0.01@2000``: over 2000 iterations after the warm-up).

    Raises:
        UserError: for any other text.
    """
    how = f"{shortened(text)}: write steps such as 64@0/32@1000/8@0.5, or a ramp such as 1~0.01@2000"
    try:
        if "~" in text:
            values, _, over = text.partition("@")
            start, end = (read_number(end_text) for end_text in values.split("~"))
            if not _MIN_VALUE < start < _MAX_VALUE or not _MIN_VALUE < end < _MAX_VALUE:
                raise UserError(f"{text}: a ramp goes from one positive number to another")
            return Schedule(ramp=(start, end, read_iterations(over, length, f"@{shortened(over)}")))
        steps, known_iterations = [], []
        for word in text.split("/"):
            value, _, first = word.partition("@")
            steps.append((read_iterations(first, length, f"@{shortened(first)}"), read_number(value)))
            if length.iterations_of is not None or not _EPOCHS.fullmatch(first):
                known_iterations.append(steps[-1][0])
    except UserError as error:
        raise UserError(f"{how} ({error})") from None
    except ValueError:
        raise UserError(how) from None
    if steps[0][0] != 0:
        raise UserError(f"{text}: the first step must begin at iteration 0")
    # The length of an epoch may be unknown; compare the other steps.
    if known_iterations != sorted(set(known_iterations)):
        raise UserError(f"{text}: the steps must begin one after the other")
    return Schedule(steps=tuple(steps))

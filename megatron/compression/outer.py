"""Options and schedule of the point ``outer``, the outer optimizer over islands.

Islands take independent inner steps and exchange pseudo-gradients, their differences from common outer parameters:
DiLoCo (Douillard et al. 2023), streamed in fragments (Douillard et al. 2025), with other compressors and settings as in
SparseLoCo (Sarfi et al. 2025) and MuLoCo (Therien et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.base.errors import UserError
from megatron.compression.options import opt

MAX_FRAGMENTS = 1 << 12
_LONGEST = 1 << 40

PRESET = "outer-preset"
"""Option that expands to a set of other options."""

PRESETS: Mapping[str, Mapping[str, str]] = {
    "diloco": {"every": "30", "outer-lr": "0.7", "outer-momentum": "0.9"},
    "streaming": {"every": "30", "outer-lr": "0.4", "outer-momentum": "0.9", "fragments": "3", "delay": "1"}
    | {"mixing": "0.5"},
    "sparseloco": {"every": "15", "outer-lr": "1", "outer-optimizer": "plain"}
    | {"error-feedback": "on", "feedback-decay": "0.95"},
    "muloco": {"every": "30", "outer-lr": "0.8", "outer-momentum": "0.9"}
    | {"error-feedback": "on", "feedback-decay": "0.9"},
}
"""Settings of published methods, without their compressors and inner optimizers. Some are options common to all
compressors."""

NOT_OFFERED: Mapping[str, str] = {
    "noloco": "random pairs average with each other alone, so islands never have an anchor in common, which rounds, "
    "checkpoints and islands that come back are made of",
}
"""Published methods without a preset, and the reason."""


@dataclass(frozen=True)
class OuterOptions:
    """Rounds of islands: every H steps they exchange the changes since the last round."""

    every: int = opt(30, "inner steps of a round", minimum=1, maximum=_LONGEST)
    outer_lr: float = opt(0.7, "step along the mean difference; 1 without momentum is plain averaging", above=0)
    outer_momentum: float | None = opt(
        None, "momentum of the mean differences", minimum=0, below=1, when_unset="0.9, and 0 with outer-optimizer=plain"
    )
    outer_optimizer: Literal["nesterov", "plain"] = opt("nesterov", "what turns mean differences into steps")
    fragments: int = opt(1, "parts of the model that take turns within a round", minimum=1, maximum=MAX_FRAGMENTS)
    delay: int = opt(0, "steps that a transfer has, while training goes on", minimum=0, maximum=_LONGEST)
    mixing: float = opt(0.0, "share of an island's own values in what it goes on with", minimum=0, below=1)
    in_step: Literal["exact", "compressed"] = opt(
        "exact", "how gradients are summed over islands during warmup: exactly, or by the point's compressor"
    )
    offload: bool = opt(False, "keep anchor and momentum in the memory of the CPU")

    def __post_init__(self) -> None:
        if self.outer_optimizer == "plain" and self.outer_momentum:
            raise UserError(
                f"outer-momentum={self.outer_momentum:g}: outer-optimizer=plain has none; leave one of the two out"
            )
        if self.fragments > self.every:
            raise UserError(
                f"fragments={self.fragments}: each needs a step of its own in every={self.every}; write at most that"
            )
        if self.every % self.fragments:
            raise UserError(
                f"every={self.every}: {self.fragments} fragments take turns at equal distances; write a multiple"
            )
        if self.delay >= self.turn:
            raise UserError(
                f"delay={self.delay}: the next transfer begins after {self.turn} steps (every / fragments), and one "
                f"must have ended by then; write at most {self.turn - 1}"
            )

    @property
    def turn(self) -> int:
        """Steps between the transfers of two fragments."""
        return self.every // self.fragments

    @property
    def ends_in_sync(self) -> bool:
        """Whether all islands equal the outer parameters after each round."""
        return self.fragments == 1 and not self.delay and not self.mixing

    @property
    def copies(self) -> int:
        """Copies kept of each parameter: the outer parameter, and momentum if used."""
        return 2 if self.momentum else 1

    @property
    def momentum(self) -> float:
        """Effective outer momentum."""
        usual = 0.0 if self.outer_optimizer == "plain" else 0.9
        return usual if self.outer_momentum is None else self.outer_momentum


@dataclass(frozen=True)
class RoundSchedule:
    """Schedule of sending and applying fragments: a pure function, equal on all islands.

    Args:
        options: options of the point.
        start: number of synchronous iterations, before the first local iteration.
        end: iterations of the whole run; after the last iteration, all fragments are sent.
    """

    options: OuterOptions
    start: int
    end: int

    def is_local(self, iteration: int) -> bool:
        """Whether an iteration (0-based) is local to an island."""
        return iteration >= self.start

    def due_fragments(self, done: int) -> list[int]:
        """Fragments to send after ``done`` iterations of the run, in order."""
        if done <= self.start:
            return []
        if done == self.end:
            return list(range(self.options.fragments))
        turns, remainder = divmod(done - self.start, self.options.turn)
        return [] if remainder else [(turns - 1) % self.options.fragments]

    def applied_at(self, done: int) -> int:
        """Number of iterations after which to apply the fragments sent after ``done`` iterations."""
        return min(done + self.options.delay, self.end)

    @property
    def rounds(self) -> int:
        """Number of rounds in the run, including a shorter last round."""
        return math.ceil(max(self.end - self.start, 0) / self.options.every)

"""Controllers, which tune options of a compressor during the run by what they measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.compression.requests import Request


@dataclass(frozen=True)
class Trial:
    """A reduction that a controller asks to have tried, on copies of the step's gradients and with states of its own.

    All ranks begin it together. Each gets three numbers of its own (fp64, on the CPU): the seconds that it took, the
    squared norm of the error, and that of the exact sum.

    Args:
        options: options of the compressor by field; None for an exact reduction.
        repeats: how often to reduce, with states that are kept in between. The seconds are the mean of all but the
            first, which makes the states; the error is the first one's.
    """

    options: Mapping[str, float] | None
    repeats: int = 3


@dataclass(frozen=True)
class Reduced:
    """One step's gradients after their reduction, for a ``Controller``.

    Args:
        iteration: 0-based.
        flats: this rank's final gradients, flat, with the loss scale; empty where the step cannot be taken.
        shapes: shapes of this rank's parameters of two or more dimensions.
        scale: the loss scale.
        compressed: whether the compressor was on, and not in its warm-up.
        stage: this rank's pipeline stage.
        ahead_s: seconds that this rank waited for the last one before the reduction, if ``Controller.meets``.
    """

    iteration: int
    flats: Sequence[Tensor]
    shapes: Sequence[tuple[int, ...]]
    scale: float
    compressed: bool
    stage: int
    ahead_s: float = 0.0


class Controller(ABC):
    """Tunes options of a compressor during the run.

    Every rank holds one. It must decide by values that are equal on all ranks, such as all-reduced ones.
    """

    def meets(self, iteration: int) -> bool:
        """Whether all ranks wait for each other before the reduction of an iteration (0-based), which
        ``Reduced.ahead_s`` needs; the same on every rank."""
        return False

    @abstractmethod
    def after_reduction(self, reduced: Reduced) -> Generator[Request | Trial, Tensor, None]:
        """Measures a step's gradients; every rank calls it after every step.

        Yields requests over the world, with small tensors on the CPU, and trials. All ranks yield the same.
        """

    @abstractmethod
    def options(self, stage: int) -> Mapping[str, float] | None:
        """The options of a pipeline stage by field, within ``Compressor.tuned_limits``; None where the stage sends
        exactly for now. At the embedding, all stages must have the same."""

    def figures(self, stages: Sequence[int]) -> Mapping[str, float]:
        """What it has measured and decided, for the log: numbers by name (``rank_of_stage_0``), equal on all ranks.

        Args:
            stages: the pipeline stages that the compressor serves.
        """
        return {}

    def moved(self) -> None:
        """The run goes on at another layout: forgets what no longer holds there, such as times."""
        return

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """The state that must survive a restart: plain numbers and lists of them, equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned.

        Raises:
            TypeError, ValueError, LookupError, ArithmeticError: when no run saves such a state; nothing has changed
                then.
        """

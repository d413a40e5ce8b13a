"""Controllers that tune options of a compressor during the run, based on measurements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.compression.requests import Request


@dataclass(frozen=True)
class Trial:
    """A trial reduction for a controller, on copies of the step's gradients and with separate states.

    All ranks begin it together. Each rank gets its own three numbers (fp64, on the CPU): the seconds that it took, the
    squared norm of the error, and the squared norm of the exact sum.

    Args:
        options: options of the compressor by field; None for an exact reduction.
        repeats: number of reductions with the same states. The seconds are the mean of all but the first reduction,
            which creates the states; the error is that of the first.
    """

    options: Mapping[str, float] | None
    repeats: int = 3


@dataclass(frozen=True)
class Reduced:
    """A step's reduced gradients, as a ``Controller`` sees them.

    Args:
        iteration: 0-based.
        flats: this rank's final gradients, flat, with the loss scale; empty if the step cannot be taken.
        shapes: shapes of this rank's parameters of two or more dimensions.
        scale: the loss scale.
        compressed: whether the compressor was on and past its warm-up.
        stage: this rank's pipeline stage.
        ahead_s: seconds that this rank waited for the slowest rank before the reduction, if
            ``Controller.needs_wait_times``.
    """

    iteration: int
    flats: Sequence[Tensor]
    shapes: Sequence[tuple[int, ...]]
    scale: float
    compressed: bool
    stage: int
    ahead_s: float = 0.0


class Controller(ABC):
    """A policy that tunes options of a compressor during the run.

    Every rank holds a controller. Its decisions must depend only on values that are equal on all ranks, such as
    all-reduced values.
    """

    def needs_wait_times(self, iteration: int) -> bool:
        """Whether all ranks wait for each other before the reduction of an iteration (0-based), to measure
        ``Reduced.ahead_s``; the same on every rank."""
        return False

    @abstractmethod
    def after_reduction(self, reduced: Reduced) -> Generator[Request | Trial, Tensor, None]:
        """Measure a step's gradients; every rank calls this after every step.

        Yields requests over the world, with small tensors on the CPU, and trials. All ranks yield the same sequence.
        """

    @abstractmethod
    def options(self, stage: int) -> Mapping[str, float] | None:
        """Options of a pipeline stage by field, within ``Compressor.tuned_limits``; None while the stage reduces
        exactly. At the embedding, all stages must have the same options."""

    def figures(self, stages: Sequence[int]) -> Mapping[str, float]:
        """Measurements and decisions for the log: numbers by name (``rank_of_stage_0``), equal on all ranks.

        Args:
            stages: the pipeline stages that the compressor serves.
        """
        return {}

    def on_layout_change(self) -> None:
        """Forget measurements that a change of the parallel layout invalidates, such as times."""
        return

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """State for checkpoints: plain numbers and lists of them, equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from ``state_dict``.

        Raises:
            TypeError, ValueError, LookupError, ArithmeticError: when the state is invalid; nothing has changed then.
        """

"""The text of training and validation lines, and the window of iterations that one line sums up.

The training line is read by other people's scripts (`TFLOPs:`, `elapsed time per iteration (s):`, `iteration
i/ n`), so its fields, their order and their formats are fixed, what is new comes last, and no other line may look
like it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainRecord:
    """The training line's values: losses are the window's means, the learning rate is the next step's."""

    iteration: int
    train_iters: int
    consumed_samples: int
    seconds_per_iteration: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    benchmark_tflops: float
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    remaining_seconds: float | None = None
    mfu: float | None = None

    @property
    def samples_per_second(self) -> float:
        return self.global_batch_size / self.seconds_per_iteration


def format_train_line(record: TrainRecord) -> str:
    """One line, with a leading space and each field closed by ` |`.

    A loss that is not above zero (no iteration of the window counted, or it is a nan) and a norm that is None
    are left out.
    """
    fields = [
        f"iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (s): {record.seconds_per_iteration:.4f}",
        f"learning rate: {record.learning_rate:.3E}",
        f"global batch size: {record.global_batch_size:5d}",
    ]
    fields += [f"{name}: {value:.6E}" for name, value in record.losses.items() if value > 0]
    fields.append(f"loss scale: {record.loss_scale:.1f}")
    if record.grad_norm is not None:
        fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros:.1f}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {record.skipped_iterations:3d}",
        f"number of nan iterations: {record.nan_iterations:3d}",
        f"samples per second: {record.samples_per_second:.3f}",
        f"TFLOPs: {record.benchmark_tflops:.2f}",
    ]
    if record.remaining_seconds is not None:
        fields.append(f"remaining time (h): {record.remaining_seconds / 3600:.2f}")
    if record.mfu is not None:
        fields.append(f"MFU: {record.mfu:.1%}")
    return " " + " ".join(f"{field} |" for field in fields)


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 so that an untrained model prints a number; nan of what is not finite."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else math.nan


def validation_prefix(iteration: int, *, samples: int | None = None, split: str = "validation") -> str:
    """Where an evaluation stands: in training by default, or on `samples` samples of a split after it."""
    where = f"iteration {iteration}"
    return where if samples is None else f"{where} on {samples}-sample draw from {split} set"


def format_validation_lines(prefix: str, losses: Mapping[str, float]) -> list[str]:
    """The validation line (nats per token and perplexity of each loss) between two dash rules.

    A loss that is not finite has no perplexity.
    """
    line = f" validation loss at {prefix} | "
    for name, value in losses.items():
        line += f"{name} value: {value:.6E} | "
        line += f"{name} PPL: {perplexity(value):.6E} | " if math.isfinite(value) else ""
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


@dataclass(frozen=True)
class WindowSummary:
    """Iterations since the last line: mean losses, mean seconds, and counts."""

    iterations: int
    seconds_per_iteration: float
    losses: dict[str, float]
    skipped_iterations: int
    nan_iterations: int


class LogWindow:
    """Sums up the iterations between two lines.

    Losses are averaged over the iterations whose optimizer step was not skipped. The clock runs from the last
    `close` (or the construction) and stands still inside `paused`, which evaluation and checkpoints use.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, float] = {}
        self._iterations = self._skipped = self._nan = 0
        self._paused_seconds = 0.0
        self._start = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent in this block."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def add(self, losses: Mapping[str, float], *, skipped: bool = False) -> None:
        """Record an iteration: its losses, and whether its optimizer step was skipped."""
        self._iterations += 1
        if any(not math.isfinite(value) for value in losses.values()):
            self._nan += 1
        if skipped:
            self._skipped += 1
            return
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def close(self) -> WindowSummary:
        """Sum up the window and start the next one. At least one iteration must have been added."""
        if self._iterations == 0:
            raise RuntimeError("a log window was closed before any iteration was added")
        counted = max(self._iterations - self._skipped, 1)
        seconds = self._clock() - self._start - self._paused_seconds
        summary = WindowSummary(
            iterations=self._iterations,
            seconds_per_iteration=seconds / self._iterations,
            losses={name: total / counted for name, total in self._sums.items()},
            skipped_iterations=self._skipped,
            nan_iterations=self._nan,
        )
        self._reset()
        return summary

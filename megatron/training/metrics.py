"""Metrics of a training step, of a log interval, and of an evaluation; and their text.

``train_step`` makes a ``StepMetrics``. ``report.py`` collects those of a log interval in a ``MetricsWindow``, whose
result has the same type, and passes both to the sinks (``sinks.py``, ``curves.py``), which write them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megatron.config.model import CLASSIFICATION_LOSS, REGRESSION_LOSS
from megatron.optimizer.step_summary import NO_VOTES, StopVotes


@dataclass(frozen=True)
class PointTraffic:
    """Traffic of one communication point, per iteration.

    Args:
        raw_bytes, wire_bytes: bytes of all ranks together, uncompressed and as sent.
        coded_s, waited_s: seconds of encoding and decoding, and of waiting: means over the ranks, which add up with
            computing to the iteration (of the device's time, on CUDA).
        residual: norm of the residuals over that of the gradients; None without error feedback.
        staleness: mean age of the residuals' contents in steps.
        inside_bytes: the part of ``wire_bytes`` that two-level sums and two-stage dispatch of tokens sent inside
            nodes; None if zero.
    """

    raw_bytes: float
    wire_bytes: float
    coded_s: float
    waited_s: float
    residual: float | None = None
    staleness: float | None = None
    inside_bytes: float | None = None

    @property
    def ratio(self) -> float:
        """Raw bytes over bytes sent."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0


ExpertLoads = Mapping[int, Sequence[float]]
"""The number of tokens that chose each expert, by layer."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of a step, or of a window of steps: mean losses, counts, and other values as of the last step."""

    # Set by train_step.
    iteration: int  # number of the step, from 1
    losses: Mapping[str, float]  # nats, by name; in a window, means over the steps that were not skipped
    global_batch_size: int
    seq_length: int
    loss_scale: float  # loss scale of the step
    grad_norm: float | None = None  # norm of the unscaled gradients before clipping; None where skipped
    params_norm: float | None = None  # if requested, as num_zeros
    num_zeros: float | None = None
    expert_loads: ExpertLoads = field(default_factory=dict)  # for layers with experts
    votes: StopVotes = NO_VOTES  # requests to stop, of all ranks
    iterations: int = 1
    skipped_iterations: int = 0  # steps without an update: a gradient was not finite, or no token counted
    nan_iterations: int = 0  # steps in a window with a loss that is not finite
    finite_gradients: bool = True
    searches_loss_scale: bool = False  # gradients overflowed under a loss scale that can still fall

    # The position of the run after the step, set by the trainer.
    consumed_samples: int = 0
    consumed_tokens: int = 0
    epoch: float | None = None  # epochs of the training set that were read
    curriculum_seqlen: int | None = None  # seq_length, where sequences grow
    learning_rate: float = 0.0  # of the step, or of a window's last step; as weight_decay
    weight_decay: float | None = None
    decoupled_learning_rate: float | None = None  # of input embeddings and the output layer, if it differs

    # (samples, tokens of each) of a window's steps -> number of such steps; empty for a single step.
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    # Measured by the reporter; all but the first for windows only.
    seconds_per_iteration: float = math.nan  # mean over a window, without pauses
    train_iters: int = 0  # iterations of the whole run
    benchmark_tflops: float = 0.0  # TFLOP/s per device by the benchmark's formula
    model_tflops: float = 0.0  # TFLOP/s that the model needs, without recomputation
    mfu: float | None = None  # model_tflops over the device's peak
    remaining_seconds: float | None = None  # time to the end of the run
    memory_bytes: int | None = None  # peak memory of this rank
    computed_s: float | None = None  # seconds of an iteration that were neither coding nor waiting
    traffic: Mapping[str, PointTraffic] = field(default_factory=dict)  # traffic of each communication point
    controllers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # point -> figures of its controller
    timers_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)  # milliseconds of each timer on each rank

    @property
    def loss(self) -> float:
        """The first loss: the language model's, or a task's."""
        return next(iter(self.losses.values()))

    @property
    def expert_imbalance(self) -> float | None:
        """The largest of ``expert_imbalances``; None without experts."""
        return max(self.expert_imbalances.values(), default=None)

    @property
    def expert_imbalances(self) -> dict[int, float]:
        """Tokens of the most loaded expert relative to its layer's mean, by layer."""
        return {n: max(counts) * len(counts) / (sum(counts) or 1.0) for n, counts in self.expert_loads.items()}

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped."""
        return self.skipped_iterations == self.iterations

    def mean_over_steps(self, function: Callable[[int, int], float]) -> float:
        """Mean over the steps of a function of a step's samples and tokens per sample."""
        sizes = self.sizes or {(self.global_batch_size, self.seq_length): 1}
        return sum(function(*size) * (count / sum(sizes.values())) for size, count in sizes.items())

    @property
    def samples_per_second(self) -> float:
        return self.mean_over_steps(lambda samples, length: samples) / self.seconds_per_iteration

    @property
    def tokens_per_second(self) -> float:
        return self.mean_over_steps(lambda samples, length: samples * length) / self.seconds_per_iteration


class MetricsWindow:
    """Steps between two log lines, combined into a ``StepMetrics``.

    The clock runs from the last ``close`` (or the construction) and is stopped inside ``paused``, which evaluation and
    checkpoints use.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._last: StepMetrics | None = None
        self._sums: dict[str, float] = {}
        self._sizes: Counter[tuple[int, int]] = Counter()
        self._iterations = self._skipped = self._nan = 0
        self._paused_seconds = 0.0
        self._start = self._clock()

    @property
    def is_empty(self) -> bool:
        """Whether no step has been added yet."""
        return self._last is None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this block."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def add_step(self, step: StepMetrics) -> None:
        """Add a step."""
        self._last = step
        self._iterations += 1
        self._nan += any(not math.isfinite(value) for value in step.losses.values())
        self._skipped += step.skipped
        self._sizes[step.global_batch_size, step.seq_length] += 1
        for name, value in step.losses.items():
            if not step.skipped:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def close(self) -> StepMetrics:
        """Summarize the window and start the next window. At least one step must have been added."""
        if self._last is None:
            raise RuntimeError("a log window was closed before any iteration was added")
        counted = max(self._iterations - self._skipped, 1)
        window = replace(
            self._last,
            losses={name: total / counted for name, total in self._sums.items()},
            iterations=self._iterations,
            skipped_iterations=self._skipped,
            nan_iterations=self._nan,
            sizes=dict(self._sizes),
            seconds_per_iteration=(self._clock() - self._start - self._paused_seconds) / self._iterations,
        )
        self._reset()
        return window


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Losses on held-out samples.

    Args:
        iteration, consumed_samples: position of the training.
        losses: losses by name, nats.
        samples: number of samples, for the evaluation after training; None during training.
        split: "validation" or "test".
        scores: task scores of each file: file -> metric -> value.
        sets: losses of several sets, whose mean is ``losses``: set -> loss -> nats; empty for a single set.
    """

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    samples: int | None = None
    split: str = "validation"
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def has_perplexity(name: str) -> bool:
    """Whether a loss is a mean over tokens, so that its exponential is a perplexity."""
    return name not in (CLASSIFICATION_LOSS, REGRESSION_LOSS)


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 so that an untrained model prints a number; nan if it is not finite."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else math.nan


def format_train_line(metrics: StepMetrics) -> str:
    """Format the training line: a leading space, and `` |`` after each field.

    Other people's scripts read it (``TFLOPs:``, ``elapsed time per iteration (s):``, ``iteration i/ n``), so its
    fields, their order and their formats are fixed, new fields come last, and no other line may look like it.

    A loss that is not above zero (no iteration of the window counted, or it is a nan) and a norm that is None are left
    out.
    """
    fields = [
        f"iteration {metrics.iteration:8d}/{metrics.train_iters:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"elapsed time per iteration (s): {metrics.seconds_per_iteration:.4f}",
        f"learning rate: {metrics.learning_rate:.3E}",
        f"global batch size: {metrics.global_batch_size:5d}",
    ]
    fields += [f"{name}: {value:.6E}" for name, value in metrics.losses.items() if value > 0]
    fields.append(f"loss scale: {metrics.loss_scale:.1f}")
    if metrics.grad_norm is not None:
        fields.append(f"grad norm: {metrics.grad_norm:.3f}")
    if metrics.num_zeros is not None:
        fields.append(f"num zeros: {metrics.num_zeros:.1f}")
    if metrics.params_norm is not None:
        fields.append(f"params norm: {metrics.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {metrics.skipped_iterations:3d}",
        f"number of nan iterations: {metrics.nan_iterations:3d}",
        f"samples per second: {metrics.samples_per_second:.3f}",
        f"TFLOPs: {metrics.benchmark_tflops:.2f}",
    ]
    if metrics.remaining_seconds is not None:
        fields.append(f"remaining time (h): {metrics.remaining_seconds / 3600:.2f}")
    if metrics.mfu is not None:
        fields.append(f"MFU: {metrics.mfu:.1%}")
    if metrics.curriculum_seqlen is not None:
        fields.append(f"curriculum seqlen: {metrics.curriculum_seqlen:5d}")
    if metrics.expert_imbalance is not None:
        fields.append(f"expert load max/mean: {metrics.expert_imbalance:.3f}")
    if metrics.epoch is not None:
        fields.append(f"epoch: {metrics.epoch:.3f}")
    if metrics.decoupled_learning_rate is not None:
        fields.append(f"decoupled learning rate: {metrics.decoupled_learning_rate:.3E}")
    return " " + " ".join(f"{field} |" for field in fields)


def format_controller_lines(metrics: StepMetrics) -> list[str]:
    """Format a line with the controller's figures for each compressor that is tuned during the run."""
    return [
        f" compressor of {point} at iteration {metrics.iteration:8d} | "
        + " ".join(f"{name.replace('_', ' ')}: {value:.5g} |" for name, value in figures.items())
        for point, figures in metrics.controllers.items()
        if figures
    ]


def format_evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Format the validation line (nats and perplexity of each loss), a line for each of several sets, and the scores of
    files, between dash rules.

    A loss that is not finite has no perplexity, and neither has a task's loss.
    """
    line = f" validation loss at iteration {evaluation.iteration}"
    if evaluation.samples is not None:
        line += f" on {evaluation.samples}-sample draw from {evaluation.split} set"
    line += f" | {_values_of_losses(evaluation.losses)}"
    sets = [
        f" {evaluation.split} loss on {name} at iteration {evaluation.iteration} | {_values_of_losses(losses)}"
        for name, losses in evaluation.sets.items()
    ]
    scores = [
        f" metrics of {file} at iteration {evaluation.iteration} | "
        + " | ".join(f"{metric}: {value:.6f}" for metric, value in values.items())
        for file, values in evaluation.scores.items()
    ]
    rule = "-" * (max(map(len, (line, *sets, *scores))) + 1)
    return [rule, line, *sets, *scores, rule]


def _values_of_losses(losses: Mapping[str, float]) -> str:
    """Format the losses and perplexities of an evaluation, with `` | `` after each."""
    text = ""
    for name, value in losses.items():
        text += f"{name} value: {value:.6E} | "
        text += f"{name} PPL: {perplexity(value):.6E} | " if math.isfinite(value) and has_perplexity(name) else ""
    return text

"""What the trainer reports: one call per iteration, log window, evaluation or other event.

`MetricLogger` formats once and hands on to its sinks. Make one on the last rank only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.logs import LoggingConfig
from megatron.training.logline import (
    TrainRecord,
    format_train_line,
    format_validation_lines,
    perplexity,
    validation_prefix,
)
from megatron.training.sinks import Sink
from megatron.training.traffic import PointTraffic


@dataclass(frozen=True)
class HonestFigures:
    """What the log line has no room for.

    model_tflops: TFLOP/s per device that the model needs, without recomputation. memory_bytes: peak memory of this
    rank. computed_s: seconds of an iteration that were neither coding nor waiting, where they were taken. traffic: of
    each communication point.
    """

    model_tflops: float
    tokens_per_second: float
    memory_bytes: int | None = None
    computed_s: float | None = None
    traffic: Mapping[str, PointTraffic] = field(default_factory=dict)


class MetricLogger:
    """Formats figures once and writes them to every sink.

    A sink that fails while the run is under way (a full disk, a closed pipe) is dropped with one line on the
    standard error: training goes on.

    Args:
        sinks: where to write; see `open_sinks`.
        config: what goes to TensorBoard, and how often.
        seq_length: tokens of a sample.
        dp_size: data-parallel replicas, for the figures per replica.
        world_size: processes of the run.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        config: LoggingConfig,
        *,
        seq_length: int,
        dp_size: int = 1,
        world_size: int = 1,
    ) -> None:
        self._sinks = list(sinks)
        self._config = config
        self._seq_length = seq_length
        self._dp_size = dp_size
        self._world_size = world_size

    def line(self, text: str) -> None:
        """Text for people, without figures."""
        self._each(lambda sink: sink.line(text))

    def event(self, kind: str, iteration: int, **values: Any) -> None:
        """A record of any kind (`checkpoint`, `exit`, ...) for the JSON-lines file."""
        event = {"kind": kind, "iteration": iteration, "time": time.time(), **values}
        self._each(lambda sink: sink.event(event))

    def iteration(
        self,
        iteration: int,
        consumed_samples: int,
        *,
        losses: Mapping[str, float],
        learning_rate: float,
        global_batch_size: int,
        loss_scale: float | None = None,
        grad_norm: float | None = None,
        num_zeros: float | None = None,
        params_norm: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """TensorBoard's points. Call it at each iteration: `--tensorboard-log-interval` is applied here."""
        config = self._config
        if iteration % config.tensorboard_log_interval:
            return
        optional = {
            "learning-rate": learning_rate if config.log_learning_rate_to_tensorboard else None,
            "weight-decay": weight_decay,
            "batch-size": global_batch_size if config.log_batch_size_to_tensorboard else None,
            "loss-scale": loss_scale if config.log_loss_scale_to_tensorboard else None,
            "world-size": self._world_size if config.log_world_size_to_tensorboard else None,
            "grad-norm": grad_norm,
            "num-zeros": num_zeros,
            "params-norm": params_norm,
        }
        values = {**losses, **{tag: value for tag, value in optional.items() if value is not None}}
        self._curves(iteration, values, samples=consumed_samples)

    def train(
        self,
        record: TrainRecord,
        figures: HonestFigures,
        *,
        timers: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """The line of a window of iterations, with its event and its throughput curves.

        `timers` are the milliseconds of each rank, as `Timers.collect` returns them.
        """
        self.line(format_train_line(record))
        slowest = {name: max(times) for name, times in (timers or {}).items()}
        optional = {
            "grad_norm": record.grad_norm,
            "num_zeros": record.num_zeros,
            "params_norm": record.params_norm,
            "remaining_seconds": record.remaining_seconds,
        }
        consumed_tokens = record.consumed_samples * self._seq_length
        self.event(
            "train",
            record.iteration,
            consumed_samples=record.consumed_samples,
            consumed_tokens=consumed_tokens,
            **_losses(record.losses),
            learning_rate=record.learning_rate,
            global_batch_size=record.global_batch_size,
            loss_scale=record.loss_scale,
            **{name: value for name, value in optional.items() if value is not None},
            skipped_iterations=record.skipped_iterations,
            nan_iterations=record.nan_iterations,
            seconds_per_iteration=record.seconds_per_iteration,
            samples_per_second=record.samples_per_second,
            tokens_per_second=figures.tokens_per_second,
            benchmark_tflops=record.benchmark_tflops,
            model_tflops=figures.model_tflops,
            mfu=record.mfu,
            memory_bytes=figures.memory_bytes,
            computed_s=figures.computed_s,
            comm={name: point.as_dict() for name, point in figures.traffic.items()},
            **({"timers_ms": slowest} if slowest else {}),
        )
        seconds = {"iteration-time": record.seconds_per_iteration}
        self._curves(record.iteration, seconds, samples=record.consumed_samples, tokens=consumed_tokens)
        self._curves(record.iteration, self._throughput(record, figures))
        if self._config.log_timers_to_tensorboard:
            self._curves(record.iteration, {f"{name}-time": value for name, value in slowest.items()})

    def _throughput(self, record: TrainRecord, figures: HonestFigures) -> dict[str, float]:
        values: dict[str, float] = {
            "samples per second": record.samples_per_second,
            "samples per second per replica": record.samples_per_second / self._dp_size,
            "tokens per second": figures.tokens_per_second,
            "tokens per second per replica": figures.tokens_per_second / self._dp_size,
            "TFLOPs per gpu (estimated)": record.benchmark_tflops,
            "model TFLOPs per device": figures.model_tflops,
        }
        if record.mfu is not None:
            values["MFU"] = record.mfu
        if figures.memory_bytes is not None:
            values["mem-max-allocated-bytes"] = figures.memory_bytes
        if figures.computed_s is not None:
            values["seconds computing"] = figures.computed_s
        for name, point in figures.traffic.items():
            values[f"bytes per iteration/{name}"] = point.wire_bytes
            values[f"compression ratio/{name}"] = point.ratio
            values[f"seconds coding/{name}"] = point.coded_s
            values[f"seconds waited/{name}"] = point.waited_s
            if point.residual is not None and point.staleness is not None:
                values[f"residual over gradient/{name}"] = point.residual
                values[f"residual age in steps/{name}"] = point.staleness
        return values

    def validation(
        self,
        iteration: int,
        losses: Mapping[str, float],
        *,
        consumed_samples: int,
        samples: int | None = None,
        split: str = "validation",
    ) -> None:
        """The lines, event and curves of an evaluation; losses are nats per token.

        `samples` is given after training (the size of the draw), not for the evaluations in between.
        """
        prefix = validation_prefix(iteration, samples=samples, split=split)
        self.line("\n".join(format_validation_lines(prefix, losses)))
        self.event(split, iteration, consumed_samples=consumed_samples, samples=samples, **_losses(losses))
        values = {f"{name} {split}": value for name, value in losses.items()}
        if self._config.log_validation_ppl_to_tensorboard:
            values |= {f"{name} {split} ppl": perplexity(value) for name, value in losses.items()}
        self._curves(iteration, values, samples=consumed_samples)

    def _curves(self, iteration: int, values: Mapping[str, float], **positions: int) -> None:
        """Points over iterations, and the same ones, marked `vs AXIS`, over other axes."""
        self._points("iterations", iteration, values)
        for axis, step in positions.items():
            self._points(axis, step, {f"{tag} vs {axis}": value for tag, value in values.items()})

    def _points(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.scalars(axis, step, values))

    def _each(self, write: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                write(sink)
            except (OSError, ValueError) as error:
                self._sinks.remove(sink)
                sys.stderr.write(f"warning: {sink.name} cannot be written any more, left out: {error}\n")

    def close(self) -> None:
        """Flush and close every sink."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()


def _losses(losses: Mapping[str, float]) -> dict[str, float]:
    return {name.replace(" ", "_"): value for name, value in losses.items()}

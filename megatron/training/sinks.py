"""Sinks of a run's metrics: the console, a text file, a JSON-lines file, TensorBoard; and what each writes.

A new sink is a class that ``open_sinks`` opens.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatron.base.errors import UserError
from megatron.config.logs import LoggingConfig
from megatron.training.metrics import Evaluation, StepMetrics, format_evaluation_lines, format_train_line, perplexity
from megatron.training.progress import ProgressBar


class Sink:
    """A sink of metrics. Every method does nothing unless a sink overrides it."""

    name = "a log"

    def line(self, text: str) -> None:
        """Writes whole lines of text, for people."""

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Writes a record of any kind (``config``, ``gradients``, ...)."""

    def step(self, metrics: StepMetrics) -> None:
        """Writes a step's metrics."""

    def window(self, metrics: StepMetrics) -> None:
        """Writes the metrics of a log interval."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Writes an evaluation."""

    def close(self) -> None:
        """Flushes and closes."""


class Sinks:
    """All sinks of a run, as one.

    One that fails while the run is under way (a full disk, a closed pipe) is closed and dropped with one line on the
    standard error: training goes on.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def line(self, text: str) -> None:
        self._each(lambda sink: sink.line(text))

    def event(self, kind: str, iteration: int, **values: Any) -> None:
        self._each(lambda sink: sink.event(kind, iteration, values))

    def step(self, metrics: StepMetrics) -> None:
        self._each(lambda sink: sink.step(metrics))

    def window(self, metrics: StepMetrics) -> None:
        self._each(lambda sink: sink.window(metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._each(lambda sink: sink.evaluation(evaluation))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, write: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                write(sink)
            except (OSError, ValueError) as error:
                self._sinks.remove(sink)
                with suppress(OSError, ValueError):
                    sink.close()
                sys.stderr.write(f"warning: {sink.name} cannot be written any more, left out: {error}\n")


class LineSink(Sink):
    """A sink that writes windows and evaluations as lines of text."""

    def window(self, metrics: StepMetrics) -> None:
        self.line(format_train_line(metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        self.line("\n".join(format_evaluation_lines(evaluation)))


class ConsoleSink(LineSink):
    """Prints lines to the standard output, or through ``write`` (a progress bar's, so that the bar stays whole)."""

    name = "the standard output"

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write

    def line(self, text: str) -> None:
        if self._write is None:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            self._write(text)


class ProgressBarSink(Sink):
    """Shows loss and speed of each step beside a progress bar, and closes it at the end."""

    name = "the progress bar"

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar

    def step(self, metrics: StepMetrics) -> None:
        self._bar.update(loss=metrics.loss, tokens_per_second=metrics.tokens_per_second)

    def close(self) -> None:
        self._bar.close()


class TextFileSink(LineSink):
    """Appends lines to a file (``--log_txt_file``)."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._file = _open_append(path, "--log_txt_file")

    def line(self, text: str) -> None:
        self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


class JsonLinesSink(Sink):
    """Appends one JSON object a line to a file (``--log-json-file``).

    A run that goes on in an existing file first writes a ``resume`` event with the iteration it starts from:
    events of later iterations before it belong to work that was lost. ``read_records`` leaves them out. A number
    that is not finite is written as null, so that every line is strict JSON.
    """

    def __init__(self, path: str | Path, resume_iteration: int = 0) -> None:
        self.name = str(path)
        self._file = _open_append(path, "--log-json-file")
        if self._file.tell() > 0:
            self.event("resume", resume_iteration, {})

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        event = {"kind": kind, "iteration": iteration, "time": time.time(), **values}
        self._file.write(json.dumps(_finite(event), allow_nan=False) + "\n")

    def window(self, metrics: StepMetrics) -> None:
        optional = {name: getattr(metrics, name) for name in ("grad_norm", "num_zeros", "params_norm")}
        optional |= {name: getattr(metrics, name) for name in ("remaining_seconds", "curriculum_seqlen")}
        timers_ms = _slowest(metrics)
        values = {
            "consumed_samples": metrics.consumed_samples,
            "consumed_tokens": metrics.consumed_tokens,
            **_keys(metrics.losses),
            "learning_rate": metrics.learning_rate,
            "global_batch_size": metrics.global_batch_size,
            "loss_scale": metrics.loss_scale,
            **_known(optional),
            "skipped_iterations": metrics.skipped_iterations,
            "nan_iterations": metrics.nan_iterations,
            "seconds_per_iteration": metrics.seconds_per_iteration,
            "samples_per_second": metrics.samples_per_second,
            "tokens_per_second": metrics.tokens_per_second,
            "benchmark_tflops": metrics.benchmark_tflops,
            "model_tflops": metrics.model_tflops,
            "mfu": metrics.mfu,
            "memory_bytes": metrics.memory_bytes,
            "computed_s": metrics.computed_s,
            "comm": {name: point.as_dict() for name, point in metrics.traffic.items()},
        }
        self.event("train", metrics.iteration, {**values, **({"timers_ms": timers_ms} if timers_ms else {})})

    def evaluation(self, evaluation: Evaluation) -> None:
        values = {"consumed_samples": evaluation.consumed_samples, "samples": evaluation.samples}
        self.event(evaluation.split, evaluation.iteration, {**values, **_keys(evaluation.losses)})

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    """Writes curves for TensorBoard (``--tensorboard-dir``), with Megatron's tags.

    Curves over samples and tokens (``lm loss vs samples``) are runs of their own in subfolders ``samples`` and
    ``tokens``. A resumed run has to discard the points of lost work, and TensorBoard discards by the step of a
    whole run: with steps of several kinds in one run it would discard nearly all of the curves over samples.

    Args:
        folder: folder of the event files.
        config: sections that decide what is written, and how often.
        dp_size: data-parallel replicas, for the figures per replica.
        world_size: processes of the run.
        resume: position on each axis (``iterations``, ``samples``, ``tokens``) that the run goes on from.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LoggingConfig,
        *,
        dp_size: int = 1,
        world_size: int = 1,
        resume: Mapping[str, int] | None = None,
    ) -> None:
        self.name = f"TensorBoard's events in {folder}"
        self._config, self._dp_size, self._world_size = config, dp_size, world_size
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "--tensorboard-dir needs the tensorboard package: pip install tensorboard, or drop the flag"
            ) from error
        self._make_writer: Callable[..., Any] = SummaryWriter
        self._folder = Path(folder)
        self._resume = dict(resume or {})
        self._writers: dict[str, Any] = {}
        # TensorBoard's threads print a trace of their own besides what the next call raises.
        self._hook_before = threading.excepthook
        threading.excepthook = self._on_thread_error
        self._writer("iterations")

    def _on_thread_error(self, failed: threading.ExceptHookArgs) -> None:
        if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")):
            self._hook_before(failed)

    def _writer(self, axis: str) -> Any:
        if axis not in self._writers:
            folder = self._folder if axis == "iterations" else self._folder / axis
            try:
                self._writers[axis] = self._make_writer(
                    str(folder), max_queue=self._config.tensorboard_queue_size, purge_step=self._resume.get(axis, 0) + 1
                )
            except OSError as error:
                raise UserError(f"--tensorboard-dir {folder}: cannot write there ({error.strerror})") from error
        return self._writers[axis]

    def step(self, metrics: StepMetrics) -> None:
        config = self._config
        if metrics.iteration % config.tensorboard_log_interval:
            return
        optional = {
            "learning-rate": metrics.learning_rate if config.log_learning_rate_to_tensorboard else None,
            "weight-decay": metrics.weight_decay,
            "batch-size": metrics.global_batch_size if config.log_batch_size_to_tensorboard else None,
            "loss-scale": metrics.loss_scale if config.log_loss_scale_to_tensorboard else None,
            "curriculum_seqlen": metrics.curriculum_seqlen,
            "world-size": self._world_size if config.log_world_size_to_tensorboard else None,
            "grad-norm": metrics.grad_norm,
            "num-zeros": metrics.num_zeros,
            "params-norm": metrics.params_norm,
        }
        values = {**metrics.losses, **_known(optional)}
        self._curves(metrics.iteration, values, samples=metrics.consumed_samples)

    def window(self, metrics: StepMetrics) -> None:
        seconds = {"iteration-time": metrics.seconds_per_iteration}
        self._curves(metrics.iteration, seconds, samples=metrics.consumed_samples, tokens=metrics.consumed_tokens)
        self._curves(metrics.iteration, self._throughput(metrics))
        if self._config.log_timers_to_tensorboard:
            self._curves(metrics.iteration, {f"{name}-time": value for name, value in _slowest(metrics).items()})

    def _throughput(self, metrics: StepMetrics) -> dict[str, float]:
        optional = {
            "MFU": metrics.mfu,
            "mem-max-allocated-bytes": metrics.memory_bytes,
            "seconds computing": metrics.computed_s,
        }
        values: dict[str, float] = {
            "samples per second": metrics.samples_per_second,
            "samples per second per replica": metrics.samples_per_second / self._dp_size,
            "tokens per second": metrics.tokens_per_second,
            "tokens per second per replica": metrics.tokens_per_second / self._dp_size,
            "TFLOPs per gpu (estimated)": metrics.benchmark_tflops,
            "model TFLOPs per device": metrics.model_tflops,
            **_known(optional),
        }
        for name, point in metrics.traffic.items():
            values[f"bytes per iteration/{name}"] = point.wire_bytes
            values[f"compression ratio/{name}"] = point.ratio
            values[f"seconds coding/{name}"] = point.coded_s
            values[f"seconds waited/{name}"] = point.waited_s
            if point.residual is not None and point.staleness is not None:
                values[f"residual over gradient/{name}"] = point.residual
                values[f"residual age in steps/{name}"] = point.staleness
        return values

    def evaluation(self, evaluation: Evaluation) -> None:
        values = {f"{name} {evaluation.split}": value for name, value in evaluation.losses.items()}
        if self._config.log_validation_ppl_to_tensorboard:
            values |= {f"{tag} ppl": perplexity(value) for tag, value in values.items()}
        self._curves(evaluation.iteration, values, samples=evaluation.consumed_samples)

    def _curves(self, iteration: int, values: Mapping[str, float], **positions: int) -> None:
        """Writes points over iterations, and the same ones, marked ``vs AXIS``, over other axes."""
        for axis, step in {"iterations": iteration, **positions}.items():
            writer, suffix = self._writer(axis), f" vs {axis}" if axis in positions else ""
            for tag, value in values.items():
                writer.add_scalar(f"{tag}{suffix}", value, step)

    def close(self) -> None:
        try:
            for writer in self._writers.values():
                writer.flush()  # raises what the writer's thread met
                writer.close()
        finally:
            threading.excepthook = self._hook_before


def open_sinks(
    config: LoggingConfig,
    *,
    dp_size: int = 1,
    world_size: int = 1,
    resume: Mapping[str, int] | None = None,
    console: Callable[[str], None] | None = None,
) -> list[Sink]:
    """Opens the sinks that the configuration asks for; the console always.

    Args:
        config: configuration that names the files and folders.
        dp_size, world_size: data-parallel replicas and processes of the run.
        resume: position on each axis (``iterations``, ``samples``, ``tokens``) of the checkpoint that was loaded.
        console: writes lines instead of the standard output, such as ``ProgressBar.write``.

    Raises:
        UserError: when a file cannot be opened or a package is missing; the message names the flag.
    """
    sinks: list[Sink] = [ConsoleSink(console)]
    if config.log_txt_file is not None:
        sinks.append(TextFileSink(config.log_txt_file))
    if config.log_json_file is not None:
        sinks.append(JsonLinesSink(config.log_json_file, (resume or {}).get("iterations", 0)))
    if config.tensorboard_dir is not None:
        folder = config.tensorboard_dir
        sinks.append(TensorBoardSink(folder, config, dp_size=dp_size, world_size=world_size, resume=resume))
    return sinks


def _slowest(metrics: StepMetrics) -> dict[str, float]:
    """Milliseconds of each timer on the rank that took longest."""
    return {name: max(times) for name, times in metrics.timers_ms.items()}


def _keys(losses: Mapping[str, float]) -> dict[str, float]:
    """Losses by their keys in JSON."""
    return {name.replace(" ", "_"): value for name, value in losses.items()}


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _finite(value: Any) -> Any:
    """The same value with None for every float that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _open_append(path: str | Path, flag: str) -> IO[str]:
    """Opens for appending, line-buffered, making the folder; a torn last line is closed first."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        return open(path, "a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot write there ({error.strerror})") from error

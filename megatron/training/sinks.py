"""The sinks of a run's metrics: console, text file, JSON-lines file, and curves (``curves.py``).

A new sink is a class that ``open_sinks`` opens.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from megatron.base.errors import UserError
from megatron.config.logs import LoggingConfig
from megatron.training.curves import TensorBoardSink, WandbSink
from megatron.training.metrics import Evaluation, StepMetrics, format_evaluation_lines, format_train_line
from megatron.training.mlflow_sink import MlflowSink
from megatron.training.progress import ProgressBar
from megatron.training.sink import Sink, drop_missing, slowest


class Sinks:
    """All sinks of a run, combined.

    A sink that fails during the run (a full disk, a closed pipe) is closed and dropped with one line on the
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

    @property
    def tracked_runs(self) -> dict[str, str]:
        """The services' names of this run, by service."""
        pairs = ((sink.tracker, sink.run_id) for sink in self._sinks)
        return {tracker: run_id for tracker, run_id in pairs if tracker is not None and run_id is not None}

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
    """Sink that prints lines through a progress bar's ``write``, so that the bar stays intact."""

    name = "the standard output"

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def line(self, text: str) -> None:
        self._write(text)


class ProgressBarSink(Sink):
    """Sink that shows loss and speed of each step beside a progress bar, and closes it at the end."""

    name = "the progress bar"

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar

    def step(self, metrics: StepMetrics) -> None:
        self._bar.update(loss=metrics.loss, tokens_per_second=metrics.tokens_per_second)

    def close(self) -> None:
        self._bar.close()


class TextFileSink(LineSink):
    """Sink that appends lines to a file (``--log_txt_file``)."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._file = _open_append(path, "--log_txt_file")

    def line(self, text: str) -> None:
        self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


class JsonLinesSink(Sink):
    """Sink that appends JSON lines to a file (``--log-json-file``).

    A run that continues in an existing file first writes a ``resume`` event with its starting iteration: earlier events
    of later iterations belong to lost work, and ``read_records`` leaves them out. A number that is not finite is
    written as null, so that every line is strict JSON.
    """

    def __init__(self, path: str | Path, resume_iteration: int) -> None:
        self.name = str(path)
        self._file = _open_append(path, "--log-json-file")
        if self._file.tell() > 0:
            self.event("resume", resume_iteration, {})

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        event = {"kind": kind, "iteration": iteration, "time": time.time(), **values}
        self._file.write(json.dumps(_replace_non_finite(event), allow_nan=False) + "\n")

    def window(self, metrics: StepMetrics) -> None:
        optional = {name: getattr(metrics, name) for name in ("grad_norm", "num_zeros", "params_norm")}
        optional |= {name: getattr(metrics, name) for name in ("remaining_seconds", "curriculum_seqlen", "epoch")}
        optional["decoupled_learning_rate"] = metrics.decoupled_learning_rate
        loads = {str(layer + 1): list(counts) for layer, counts in metrics.expert_loads.items()}
        timers_ms = slowest(metrics)
        values = {
            "consumed_samples": metrics.consumed_samples,
            "consumed_tokens": metrics.consumed_tokens,
            **_keyed(metrics.losses),
            "learning_rate": metrics.learning_rate,
            "global_batch_size": metrics.global_batch_size,
            "loss_scale": metrics.loss_scale,
            **drop_missing(optional),
            **({"expert_loads": loads, "expert_imbalance": metrics.expert_imbalance} if loads else {}),
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
            "comm": {name: drop_missing(asdict(point)) for name, point in metrics.traffic.items()},
        }
        maps = {"controllers": metrics.controllers, "timers_ms": timers_ms}
        self.event("train", metrics.iteration, {**values, **{name: table for name, table in maps.items() if table}})

    def evaluation(self, evaluation: Evaluation) -> None:
        values = {"consumed_samples": evaluation.consumed_samples, "samples": evaluation.samples}
        scores = {"scores": evaluation.scores} if evaluation.scores else {}
        sets = {"sets": {name: _keyed(losses) for name, losses in evaluation.sets.items()}} if evaluation.sets else {}
        self.event(evaluation.split, evaluation.iteration, {**values, **_keyed(evaluation.losses), **sets, **scores})

    def close(self) -> None:
        self._file.close()


def open_sinks(
    config: LoggingConfig,
    *,
    dp_size: int,
    world_size: int,
    resume: Mapping[str, int],
    console: Callable[[str], None],
    tracked_runs: Mapping[str, str],
) -> list[Sink]:
    """Open the sinks that the configuration asks for; the console always.

    Args:
        config: configuration that names the files and folders.
        dp_size, world_size: data-parallel replicas and processes of the run.
        resume: position of the run on each axis (``iterations``, ``samples``, ``tokens``).
        console: prints lines: ``ProgressBar.write``.
        tracked_runs: the runs of Weights & Biases and MLflow to resume.

    Raises:
        UserError: when a file cannot be opened or a package is missing; the message names the flag. The sinks that
            were opened before are closed.
    """
    sizes = {"dp_size": dp_size, "world_size": world_size}
    sinks: list[Sink] = [ConsoleSink(console)]
    try:
        if config.log_txt_file is not None:
            sinks.append(TextFileSink(config.log_txt_file))
        if config.log_json_file is not None:
            sinks.append(JsonLinesSink(config.log_json_file, resume["iterations"]))
        if config.tensorboard_dir is not None:
            sinks.append(TensorBoardSink(config.tensorboard_dir, config, **sizes, resume=resume))
        if config.wandb_project is not None:
            sinks.append(WandbSink(config.wandb_project, config, **sizes, run_id=tracked_runs.get(WandbSink.tracker)))
        if config.mlflow_experiment is not None:
            sinks.append(
                MlflowSink(config.mlflow_experiment, config, **sizes, run_id=tracked_runs.get(MlflowSink.tracker))
            )
    except UserError:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _keyed(losses: Mapping[str, float]) -> dict[str, float]:
    """Losses by their keys in JSON."""
    return {name.replace(" ", "_"): value for name, value in losses.items()}


def _replace_non_finite(value: Any) -> Any:
    """Replace every float that JSON cannot represent by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value


def _open_append(path: str | Path, flag: str) -> IO[str]:
    """Open a file for appending, line-buffered, creating its folder; a torn last line is terminated first."""
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

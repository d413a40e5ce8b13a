"""Curve sinks: TensorBoard and Weights & Biases, with Megatron's tags."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError, first_line
from megatron.config.logs import LoggingConfig
from megatron.training.metrics import Evaluation, StepMetrics, has_perplexity, perplexity
from megatron.training.sink import Sink, drop_missing, slowest


class CurveSink(Sink, ABC):
    """A sink that writes values over iterations.

    Args:
        config: logging section, which decides which values are written, and how often.
        dp_size: data-parallel replicas, for values per replica.
        world_size: processes of the run.
    """

    def __init__(self, config: LoggingConfig, *, dp_size: int, world_size: int) -> None:
        self._config, self._dp_size, self._world_size = config, dp_size, world_size

    @abstractmethod
    def _curves(self, iteration: int, values: Mapping[str, float], **positions: int) -> None:
        """Write points of curves.

        Args:
            iteration: position of the points.
            values: numbers by tag.
            positions: further axes (``samples``, ``tokens``) for these curves, with the points' positions.
        """

    def step(self, metrics: StepMetrics) -> None:
        config = self._config
        if metrics.iteration % config.tensorboard_log_interval:
            return
        rates = config.log_learning_rate_to_tensorboard
        optional = {
            "learning-rate": metrics.learning_rate if rates else None,
            "decoupled-learning-rate": metrics.decoupled_learning_rate if rates else None,
            "weight-decay": metrics.weight_decay,
            "batch-size": metrics.global_batch_size if config.log_batch_size_to_tensorboard else None,
            "loss-scale": metrics.loss_scale if config.log_loss_scale_to_tensorboard else None,
            "curriculum_seqlen": metrics.curriculum_seqlen,
            "world-size": self._world_size if config.log_world_size_to_tensorboard else None,
            "grad-norm": metrics.grad_norm,
            "num-zeros": metrics.num_zeros,
            "params-norm": metrics.params_norm,
        }
        imbalances = {f"expert load max over mean/layer {n + 1}": x for n, x in metrics.expert_imbalances.items()}
        values = {**metrics.losses, **drop_missing(optional), **imbalances}
        self._curves(metrics.iteration, values, samples=metrics.consumed_samples)

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        if kind == "loss_check":
            curves = {"expected loss increase in percent": values["expected_increase"]}
            curves |= {f"expected loss increase in percent/{name}": cost for name, cost in values["points"].items()}
            curves |= {f"compressor setting/{name}": position for name, position in values["settings"].items()}
            self._curves(iteration, curves)

    def window(self, metrics: StepMetrics) -> None:
        seconds = {"iteration-time": metrics.seconds_per_iteration}
        self._curves(metrics.iteration, seconds, samples=metrics.consumed_samples, tokens=metrics.consumed_tokens)
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
            **drop_missing(optional),
        }
        for name, point in metrics.traffic.items():
            values[f"bytes per iteration/{name}"] = point.wire_bytes
            values[f"compression ratio/{name}"] = point.ratio
            values[f"seconds coding/{name}"] = point.coded_s
            values[f"seconds waited/{name}"] = point.waited_s
            if point.residual is not None and point.staleness is not None:
                values[f"residual over gradient/{name}"] = point.residual
                values[f"residual age in steps/{name}"] = point.staleness
        for name, figures in metrics.controllers.items():
            values |= {f"{figure.replace('_', ' ')}/{name}": value for figure, value in figures.items()}
        self._curves(metrics.iteration, values)
        if self._config.log_timers_to_tensorboard:
            self._curves(metrics.iteration, {f"{name}-time": value for name, value in slowest(metrics).items()})

    def evaluation(self, evaluation: Evaluation) -> None:
        values = {f"{name} {evaluation.split}": value for name, value in evaluation.losses.items()}
        if self._config.log_validation_ppl_to_tensorboard:
            tokens = {name: value for name, value in evaluation.losses.items() if has_perplexity(name)}
            values |= {f"{name} {evaluation.split} ppl": perplexity(value) for name, value in tokens.items()}
        for name, losses in evaluation.sets.items():
            values |= {f"{loss} {evaluation.split}/{name}": value for loss, value in losses.items()}
        for file, scores in evaluation.scores.items():
            values |= {f"{metric} {evaluation.split}/{file}": value for metric, value in scores.items()}
        self._curves(evaluation.iteration, values, samples=evaluation.consumed_samples)


class TensorBoardSink(CurveSink):
    """Curves for TensorBoard (``--tensorboard-dir``).

    Curves over samples and tokens (``lm loss vs samples``) are separate TensorBoard runs in the subfolders ``samples``
    and ``tokens``. A resumed run has to discard the points of lost work, and TensorBoard discards by step across a
    whole run: with several kinds of steps in a run it would discard nearly all of the curves over samples.

    Args:
        folder: folder of the event files.
        config, dp_size, world_size: the arguments of ``CurveSink``.
        resume: position on each axis (``iterations``, ``samples``, ``tokens``) at which the run begins.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LoggingConfig,
        *,
        dp_size: int,
        world_size: int,
        resume: Mapping[str, int],
    ) -> None:
        self.name = f"TensorBoard's events in {folder}"
        super().__init__(config, dp_size=dp_size, world_size=world_size)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "--tensorboard-dir needs the tensorboard package: pip install tensorboard, or drop the flag"
            ) from error
        self._make_writer: Callable[..., Any] = SummaryWriter
        self._folder = Path(folder)
        self._resume = resume
        self._writers: dict[str, Any] = {}
        # TensorBoard's threads print a traceback in addition to the exception of the next call.
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
                    str(folder), max_queue=self._config.tensorboard_queue_size, purge_step=self._resume[axis] + 1
                )
            except OSError as error:
                raise UserError(f"--tensorboard-dir {folder}: cannot write there ({error.strerror})") from error
        return self._writers[axis]

    def _curves(self, iteration: int, values: Mapping[str, float], **positions: int) -> None:
        """Write points over iterations, and again over the other axes, marked ``vs AXIS``."""
        for axis, step in {"iterations": iteration, **positions}.items():
            writer, suffix = self._writer(axis), f" vs {axis}" if axis in positions else ""
            for tag, value in values.items():
                writer.add_scalar(f"{tag}{suffix}", value, step)

    def close(self) -> None:
        try:
            for writer in self._writers.values():
                writer.flush()  # raises errors of the writer's thread
                writer.close()
        finally:
            threading.excepthook = self._hook_before


class WandbSink(CurveSink):
    """Curves for a run of Weights & Biases (``--wandb-project``), which is configured by its own variables.

    If a run has gone back to an earlier checkpoint, the old and the new points both stay.

    Args:
        project: the project.
        config, dp_size, world_size: the arguments of ``CurveSink``.
        run_id: the run to resume, which is created if missing; WANDB_RUN_ID takes precedence.
    """

    tracker = "wandb"

    def __init__(
        self, project: str, config: LoggingConfig, *, dp_size: int, world_size: int, run_id: str | None
    ) -> None:
        super().__init__(config, dp_size=dp_size, world_size=world_size)
        self.name = f"the run in --wandb-project {project}"
        try:
            import wandb

            start: Callable[..., Any] = wandb.init  # an empty folder of this name imports, too
            self._errors = (wandb.Error, OSError, ValueError)
        except (ImportError, AttributeError) as error:
            raise UserError("--wandb-project needs the wandb package: pip install wandb, or drop the flag") from error
        try:
            folder = config.wandb_save_dir
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            resumed = run_id is not None and "WANDB_RUN_ID" not in os.environ
            run_options = {"id": run_id, "resume": "allow"} if resumed else {}
            self._run = start(project=project, name=config.wandb_exp_name, dir=folder, **run_options)
            self.run_id = str(self._run.id)
            # The service drops values logged at a step before the last step, but a run may go back to a checkpoint: so
            # steps count the calls, and the iteration is a value.
            for metric, axis in (("iteration", {}), ("*", {"step_metric": "iteration"})):
                self._run.define_metric(metric, **axis)
        except self._errors as error:
            reason = first_line(error)
            raise UserError(
                f"--wandb-project {project}: {reason}; log in (wandb login), or set WANDB_MODE=offline"
            ) from error

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        super().event(kind, iteration, values)
        if kind == "config":
            self._try(lambda: self._run.config.update(dict(values), allow_val_change=True))

    def _curves(self, iteration: int, values: Mapping[str, float], **positions: int) -> None:
        self._try(lambda: self._run.log({**values, **positions, "iteration": iteration}))

    def close(self) -> None:
        self._try(self._run.finish)

    def _try(self, call: Callable[[], Any]) -> None:
        """Turn the service's errors into OSError, which costs the run only this sink."""
        try:
            call()
        except self._errors as error:
            raise OSError(str(error)) from error

"""Reports of a run: log lines, events, curves, progress bar."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.distributed.ledger import gather_rows
from megatron.distributed.observer import Finding
from megatron.models.flops import benchmark_tflops, model_flops_per_sample, model_flops_utilization, model_tflops
from megatron.training.assembly import Engines
from megatron.training.forecast import FIRST_ESTIMATE, Forecast, format_estimate, format_size, model_size
from megatron.training.metrics import MetricsWindow, StepMetrics, format_controller_lines
from megatron.training.peaks import peak_tflops
from megatron.training.progress import ProgressBar
from megatron.training.progress_state import Progress
from megatron.training.run_plan import RunPlan
from megatron.training.sinks import ProgressBarSink, Sinks, open_sinks
from megatron.training.step_time_check import StepTimeCheck
from megatron.training.timers import Timers
from megatron.training.traffic import TrafficMeter, format_comm_line


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated device memory with CUDA, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def known_peak(config: RunConfig, device: torch.device) -> float | None:
    """Peak TFLOP/s for MFU, from the flag or by the GPU's name; None if unknown."""
    if config.logging.peak_tflops is not None or device.type != "cuda":
        return config.logging.peak_tflops
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_tflops(torch.cuda.get_device_name(device), config.precision.params_dtype, tf32)


class Reporter:
    """Metrics of all ranks, reported on the last rank.

    Args:
        engines: engines of this rank.
        plan: steps and data of the run.
        progress: counters of the run.
        timers: timers to report with each log line.

    ``step_time_check`` checks the time of each step, if a run assigns it.
    """

    def __init__(self, engines: Engines, plan: RunPlan, progress: Progress, timers: Timers) -> None:
        self.config = config = engines.config
        self.engines = engines
        self.progress = progress
        self.train_iters = plan.train_iters
        self.timers = timers
        self.window = MetricsWindow()
        self.meter = TrafficMeter(engines)
        self.sinks = Sinks()
        self.step_sizes = plan.sizes
        self.size = model_size(engines)
        self.peak_tflops = known_peak(config, engines.topology.device)
        self.forecast = Forecast(
            config,
            plan.sizes,
            engines.topology.layout,
            plan.train_iters,
            (sum(data.num_batches for data in plan.valid_sets), sum(data.num_batches for data in plan.test_sets)),
            lambda length: float(model_flops_per_sample(*self._model_and_vocab(length))),
        )
        self.step_time_check: StepTimeCheck | None = None
        self._step_started = time.perf_counter()
        self._is_logging_rank = engines.topology.is_last_rank

    def open(self) -> None:
        """Open the logs. Call this after the counters are restored, so that curves continue from there.

        Raises:
            UserError: when a file cannot be opened.
        """
        done, seen_tokens = self.progress, self.progress.tokens(self.config.model.seq_length)
        if self._is_logging_rank:
            bar = ProgressBar(self.train_iters, done=done.iteration, mode=self.config.logging.progress_bar)
            resume = {"iterations": done.iteration, "samples": done.consumed_samples, "tokens": seen_tokens}
            layout, islands = self.engines.topology.layout, self.config.islands.islands
            opened = open_sinks(
                self.config.logging,
                dp_size=layout.dp * islands,
                world_size=layout.world_size * islands,
                resume=resume,
                console=bar.write,
                tracked_runs=done.tracked_runs,
            )
            self.sinks = Sinks([*opened, ProgressBarSink(bar)])
        remaining_iterations = max(0, self.train_iters - done.iteration)
        tokens = seen_tokens + self.step_sizes.tokens_ahead(done.iteration, done.consumed_samples, remaining_iterations)
        self.line(format_size(self.size, tokens, seen_tokens))
        size = {"parameters": self.size.total, "largest_rank": self.size.largest, "tokens": tokens}
        if self.peak_tflops is None and self.engines.topology.device.type == "cuda":
            name = torch.cuda.get_device_name(self.engines.topology.device)
            self.line(f"note: no MFU is logged, since the peak rate of {name} is unknown; give --peak-tflops")
        self.sinks.event("config", done.iteration, config=self.config.to_dict(), size=size)

    @property
    def needs_choice(self) -> bool:
        """Whether to choose the compressors again, by the times that this rank reports; false on all other ranks."""
        return self._is_logging_rank and self.step_time_check is not None and self.step_time_check.needs_choice

    def line(self, text: str) -> None:
        """Print a line for the user."""
        self.sinks.line(text)

    def report_round(self, text: str, values: Mapping[str, Any]) -> None:
        """Report an event of islands' rounds: a line, and a record if there are values."""
        self.sinks.line(text)
        if values:
            self.sinks.event("outer", **values)

    def record(self, finding: Finding, iteration: int) -> None:
        """Write a finding to the log."""
        if finding.line is not None:
            self.sinks.line(finding.line)
        self.sinks.event(finding.kind, iteration, **finding.values)

    def start_training(self) -> None:
        """Start the clock of the first window."""
        self.engines.ledger.clear()
        self.window = MetricsWindow()
        self._step_started = time.perf_counter()

    @contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """Exclude the context's time and traffic from the training figures.

        Args:
            activity: "evaluate", "save", "check", "join" or "schedule".
        """
        start = time.perf_counter()
        with self.window.paused(), self.engines.ledger.uncounted():
            try:
                yield
            finally:
                seconds = time.perf_counter() - start
                self._step_started += seconds  # the step may not be reported yet
                self.forecast.pause(activity, seconds)

    def after_step(self, step: StepMetrics) -> None:
        """Record a step, and report the window if a line is due."""
        for observer in self.engines.ledger.observers:
            for finding in observer.findings(step.iteration):
                self.record(finding, step.iteration)
        step_ended = time.perf_counter()
        step = replace(step, seconds_per_iteration=step_ended - self._step_started)
        self._step_started = step_ended
        slowness = None if self.step_time_check is None else self.step_time_check.after_step(step)
        if slowness is not None:
            self.record(slowness, step.iteration)
        self.window.add_step(step)
        self.sinks.step(step)
        samples_before = step.consumed_samples - step.global_batch_size
        self.forecast.step(samples_before, step.seconds_per_iteration, step.seq_length)
        self.report_if_due(step.iteration)
        if self.forecast.done == FIRST_ESTIMATE:
            progress, remaining_iterations = self.progress, self.train_iters - self.progress.iteration
            seconds = self.forecast.remaining_s(progress.iteration, progress.consumed_samples)
            if remaining_iterations and seconds is not None:
                self.line(format_estimate(FIRST_ESTIMATE, remaining_iterations, seconds, datetime.now().astimezone()))

    def report_if_due(self, iteration: int) -> None:
        """Report the window if a line is due at an iteration, even if the iteration was skipped."""
        if iteration % self.config.logging.log_interval == 0:
            self.report_window()

    def report_window(self) -> None:
        """Report the steps since the last line, if there are any."""
        if self.window.is_empty:
            return
        topology = self.engines.topology
        window = self.window.close()
        traffic, warnings, computed_s = self.meter.collect(window.iterations)
        times = self.timers.collect(
            lambda values: gather_rows(topology.control, self.engines.ledger, values), iterations=window.iterations
        )
        if not self._is_logging_rank:
            return
        seconds = window.seconds_per_iteration
        world_size = self.engines.topology.layout.world_size * self.config.islands.islands
        recompute = self.config.recompute.recompute_granularity is not None

        def benchmark(samples: int, length: int) -> float:
            return benchmark_tflops(
                *self._model_and_vocab(length),
                global_batch_size=samples,
                seconds=seconds,
                world_size=world_size,
                recompute=recompute,
            )

        def model(samples: int, length: int) -> float:
            return model_tflops(
                *self._model_and_vocab(length), global_batch_size=samples, seconds=seconds, world_size=world_size
            )

        rate = window.mean_over_steps(model)
        window = replace(
            window,
            benchmark_tflops=window.mean_over_steps(benchmark),
            model_tflops=rate,
            mfu=model_flops_utilization(rate, self.peak_tflops) if self.peak_tflops is not None else None,
            train_iters=self.train_iters,
            remaining_seconds=self.forecast.remaining_s(window.iteration, window.consumed_samples),
            memory_bytes=peak_memory_bytes(topology.device),
            computed_s=computed_s,
            traffic=traffic,
            controllers=self.engines.sync.controllers.figures(),
            timers_ms=times,
        )
        self.sinks.window(window)
        if self.config.logging.log_comm:
            self.sinks.line(format_comm_line(window.iteration, traffic, computed_s))
        for line in format_controller_lines(window):
            self.sinks.line(line)
        for warning in warnings:
            self.sinks.line(f"warning: {warning}")
        if times and self.config.logging.timing_log_level > 0:
            self.sinks.line(self.timers.report(times))

    def _model_and_vocab(self, length: int) -> tuple[ModelConfig, int]:
        """Model at a sequence length, and its padded vocabulary size, for the FLOP formulas."""
        return replace(self.config.model, seq_length=length), self.engines.padded_vocab_size

    def close(self) -> None:
        """Close the log files and the progress bar."""
        self.sinks.close()

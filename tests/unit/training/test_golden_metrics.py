"""The output of every sink for the same steps, character for character: ``golden_metrics.json`` next to this file.

The test moves the clock, so each figure is known. ``python -m tests.unit.training.test_golden_metrics`` writes the file
anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.model import LM_LOSS
from megatron.config.steps import StepSizes
from megatron.distributed.clock import HostClock
from megatron.distributed.observer import SentMessage
from megatron.distributed.policy import Position
from megatron.training.error_probe import ErrorProbe
from megatron.training.evaluation import validation_sets
from megatron.training.metrics import Evaluation, MetricsWindow, StepMetrics
from megatron.training.progress_state import Progress
from megatron.training.report import Reporter
from megatron.training.run_plan import RunPlan
from megatron.training.timers import Timers
from tests.support.tiny import tiny_engines
from tests.unit.training.support import Clock, read_curves

GOLDEN = Path(__file__).with_name("golden_metrics.json")

ALL_ON: dict[str, Any] = {
    "log_interval": 4,
    "log_comm": True,
    "timing_log_level": 1,
    "peak_tflops": 0.001,
    "log_timers_to_tensorboard": True,
    "log_batch_size_to_tensorboard": True,
    "log_validation_ppl_to_tensorboard": True,
    "log_world_size_to_tensorboard": True,
    "log_gradients": True,
    "log_gradients_interval": 4,
}
PLAIN: dict[str, Any] = {
    "log_interval": 2,
    "tensorboard_log_interval": 2,
    "log_learning_rate_to_tensorboard": False,
    "log_loss_scale_to_tensorboard": False,
}


class Run:
    """A run with made-up steps."""

    def __init__(self, folder: Path, clock: Clock, options: dict[str, Any]) -> None:
        files = {"log_txt_file": "log.txt", "log_json_file": "log.jsonl", "tensorboard_dir": "curves"}
        logging = {**options, **{name: str(folder / file) for name, file in files.items()}}
        self.clock, self.folder = clock, folder
        self.engines = tiny_engines({"logging": logging})
        self.engines.ledger.clock = HostClock(clock)
        self.progress = Progress()
        self.timers = Timers(level=1, clock=HostClock(clock))
        sizes = StepSizes(BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), LengthSchedule.constant(16))
        unread: Any = object()
        evaluated = validation_sets(self.engines.config, unread)
        plan = RunPlan(30, sizes, None, evaluated, evaluated, started=0.0)
        self.reporter = Reporter(self.engines, plan, self.progress, self.timers)

    def begin(self) -> None:
        self.reporter.open()
        self.reporter.start_training()
        self.reporter.window = MetricsWindow(self.clock)

    def probe_errors(self) -> None:
        """Two micro-batches cross boundary 0, and the gradient of the first loses something on the way back."""
        probe, first, second = ErrorProbe(), Position(0, 0, 0), Position(0, 0, 1)
        probe.on_receive(Point.PP_FWD, first, torch.tensor([1.0, 2.0]))
        probe.on_receive(Point.PP_FWD, second, torch.tensor([4.0, 6.0]))
        codec, state = LowRankCodec(LowRankConfig()), CompressorState()
        state.tensors[RESIDUAL] = torch.tensor([5.0, 0.0])
        payload = codec.empty_payload(torch.Size((2,)), torch.float32, torch.device("cpu"), state, None)
        probe.on_send(SentMessage(Point.PP_BWD, first, torch.ones(2), codec, payload, state, None))
        self.engines.ledger.observers.insert(0, probe)

    def step(self, loss: float, grad_norm: float | None, lr: float, **norms: Any) -> None:
        """A step of half a second, the most of it computing; without a norm it is skipped."""
        for observer in self.engines.ledger.observers:
            observer.begin_step(self.progress.iteration)
        with self.timers("forward-backward", level=1), self.engines.ledger.computing():
            self.clock.now += 0.375
        self.engines.ledger.count_message(Point.DP_GRAD, 500, 2000)
        with self.engines.ledger.encoding(Point.DP_GRAD):
            self.clock.now += 0.125
        with self.engines.ledger.span("optimizer"):
            pass
        self.progress.iteration += 1
        self.progress.consumed_samples += 4
        self.reporter.after_step(
            StepMetrics(
                iteration=self.progress.iteration,
                losses={LM_LOSS: loss},
                global_batch_size=4,
                seq_length=16,
                loss_scale=4096.0 / self.progress.iteration,
                grad_norm=grad_norm,
                skipped_iterations=int(grad_norm is None),
                consumed_samples=self.progress.consumed_samples,
                consumed_tokens=16 * self.progress.consumed_samples,
                learning_rate=lr,
                weight_decay=0.1,
                **norms,
            )
        )

    def evaluate(self, loss: float, samples: int | None = None, split: str = "validation") -> None:
        """An evaluation."""
        iteration, consumed_samples, losses = self.progress.iteration, self.progress.consumed_samples, {LM_LOSS: loss}
        self.reporter.sinks.evaluation(
            Evaluation(
                iteration=iteration, consumed_samples=consumed_samples, losses=losses, samples=samples, split=split
            )
        )

    def written(self, console: str) -> dict[str, Any]:
        """Current contents of all outputs, without the configuration."""
        records = (self.folder / "log.jsonl").read_text().splitlines()
        assert [json.loads(record)["kind"] for record in records].index("config") == 0
        text = (self.folder / "log.txt").read_text()
        assert text == console
        curves = {axis: _curves(self.folder / "curves" / axis) for axis in ("", "samples", "tokens")}
        return {"lines": text.splitlines(), "json lines": records[1:], "tensorboard": curves}


def _curves(folder: Path) -> dict[str, str]:
    return {tag: ", ".join(f"{at}: {value!r}" for at, value in curve) for tag, curve in read_curves(folder).items()}


def _everything(run: Run) -> None:
    """Two windows with a skipped step and a loss that is not finite, evaluations, probes."""
    slot = run.engines.buffers[0].buckets[0].slots[0]
    run.engines.buffers[0].grads_flat[slot.start] = 2.0
    run.probe_errors()
    run.step(4.0, 2.5, 1e-3, params_norm=99.5, num_zeros=12.0)
    run.step(math.inf, None, 2e-3, params_norm=99.5, num_zeros=12.0)
    run.step(2.0, 1.25, 2e-3, params_norm=99.25, num_zeros=13.0)
    run.step(1.5, 1.125, 3e-3, params_norm=99.125, num_zeros=14.0)
    with run.reporter.paused("evaluate"):
        run.clock.now += 7.0
        run.evaluate(3.25)
    for loss in (1.25, math.nan, 1.0, 0.75):
        run.step(loss, 0.5, 3e-3)
    run.evaluate(0.5, samples=16, split="test")
    run.evaluate(math.nan, samples=16)


def _skipped(run: Run) -> None:
    """A window of skipped steps."""
    run.step(math.nan, None, 1e-3)
    run.step(7.0, None, 1e-3)
    run.evaluate(6.5)


SCENES = {"everything": (ALL_ON, _everything), "skipped": (PLAIN, _skipped)}


def _output(name: str) -> dict[str, Any]:
    options, play = SCENES[name]
    clock, console = Clock(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(time, "perf_counter", clock),
        mock.patch.object(time, "time", return_value=1.5),
        mock.patch("megatron.training.report.peak_memory_bytes", return_value=10**9),
        contextlib.redirect_stdout(console),
    ):
        run = Run(Path(folder), clock, options)
        run.begin()
        play(run)
        run.reporter.close()
        return run.written(console.getvalue())


@pytest.mark.parametrize("name", list(SCENES))
def test_the_output_of_every_sink_is_unchanged(name: str) -> None:
    expected, written = json.loads(GOLDEN.read_text())[name], _output(name)
    for sink, content in expected.items():
        assert written[sink] == content


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: _output(name) for name in SCENES}, indent=1) + "\n")

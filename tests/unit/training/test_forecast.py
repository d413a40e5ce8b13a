"""The remaining time of a run, against a simulated run."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.run import RunConfig
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.distributed.layout import Layout
from megatron.training.forecast import Forecast, ModelSize, format_estimate, format_size
from tests.unit.training.test_metrics import ELAPSED, ITERATION, TFLOPS

SECONDS = {"evaluate": 7.0, "save": 3.0, "check": 0.5}


class PlayedRun:
    """A simulated run: an iteration takes the time of its micro-batches and of filling the pipeline."""

    def __init__(
        self, pp: int = 1, chunks: int = 1, start: int = 0, grows: bool = False, **sections: dict[str, Any]
    ) -> None:
        plain: dict[str, dict[str, Any]] = {
            "model": {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8},
            "training": {"micro_batch_size": 1, "global_batch_size": 16, "train_iters": 200},
            "optimizer": {"lr": 1e-3},
            "tokenizer": {"vocab_size": 50},
            "validation": {"eval_interval": 10**9, "eval_iters": 2},
        }
        for name, values in sections.items():
            plain[name] = plain.get(name, {}) | values
        self.config = config = RunConfig.from_dict(plain)
        self.layout = Layout(tp=1, pp=pp, dp=1, chunks=chunks)
        sizes = config.training
        self.batches = BatchSizeSchedule(
            sizes.global_batch_size, micro_batch_size=1, dp_size=1, rampup=sizes.rampup_batch_size
        )
        assert sizes.train_iters is not None
        self.last, self.now = sizes.train_iters, 0.0
        self.iteration, self.consumed = start, self.batches.samples_ahead(0, start)
        full = config.model.seq_length
        growing = LengthSchedule.growing(lambda step: 1 + (full - 1) * step // 120, 120, full)
        self.lengths = growing if grows else LengthSchedule.constant(full)
        rounds = (config.validation.eval_iters, 0)
        self.forecast = Forecast(config, StepSizes(self.batches, self.lengths), self.layout, self.last, rounds)
        self.expected: dict[int, float] = {}

    def _pause(self, kind: str, every: int | None) -> None:
        if every and self.iteration % every == 0:
            self.forecast.pause(kind, SECONDS[kind])
            self.now += SECONDS[kind]

    def play(self) -> None:
        """Runs to the end; notes the expected time of the end after each iteration."""
        config = self.config
        while self.iteration < self.last:
            filling = (self.layout.pp - 1) / self.layout.chunks
            seconds = 0.2 * (self.batches.num_micro_batches(self.consumed) + filling)
            length = self.lengths.at(self.iteration)
            seconds *= length / self.config.model.seq_length
            seconds += 30.0 if not self.forecast.done else 0.0  # the first iteration compiles
            self.forecast.step(self.consumed, seconds, length)
            self.consumed += self.batches.at(self.consumed)
            self.iteration, self.now = self.iteration + 1, self.now + seconds
            self._pause("check", config.training.check_replicas)
            remaining_s = self.forecast.remaining_s(self.iteration, self.consumed)
            assert remaining_s is not None
            self.expected[self.iteration] = self.now + remaining_s
            self._pause("evaluate", config.validation.eval_interval)
            self._pause("save", config.checkpoint.save_interval)
        self.now += SECONDS["evaluate"] if config.validation.eval_iters else 0.0
        self.now += SECONDS["save"] if config.checkpoint.save else 0.0


RAMPUP = {"train_iters": 300, "rampup_batch_size": [2, 2, 1500]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pipeline": {"pp": 4},
    "interleaved": {"pp": 4, "chunks": 2},
    "growing batches": {"pp": 2, "training": RAMPUP},
    "growing sequences": {"pp": 2, "grows": True},
    "growing batches and sequences": {"pp": 2, "grows": True, "training": RAMPUP},
    "resumed": {"start": 150},
    "resumed while batches grow": {"start": 40, "training": RAMPUP},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_end_is_known_after_three_iterations(case: dict[str, Any]) -> None:
    run = PlayedRun(**case, validation={"eval_iters": 0})
    first = run.iteration
    run.play()
    assert len(run.expected) == run.last - first
    for iteration, end in run.expected.items():
        if iteration >= first + 3:
            assert end == pytest.approx(run.now, rel=1e-9)


@pytest.mark.parametrize("start", [0, 55])
def test_evaluations_saves_and_checks_count_after_the_first_of_each(start: int) -> None:
    run = PlayedRun(
        start=start,
        training={"check_replicas": 7},
        validation={"eval_interval": 20},
        checkpoint={"save": "x", "save_interval": 30},
    )
    run.play()
    for iteration, end in run.expected.items():
        if iteration > start + 30:
            assert end == pytest.approx(run.now, rel=1e-9)
    # Before that, an evaluation counts by its micro-batches: 11 of 2 x 16 at a third of 0.2 s, for 7 s each.
    early = run.expected[start + 5]
    assert 0.5 * run.now < early < run.now


def test_there_is_no_forecast_before_the_first_iteration() -> None:
    run = PlayedRun()
    assert run.forecast.remaining_s(0, 0) is None
    run.forecast.step(0, 100.0)
    assert run.forecast.remaining_s(1, 16) == pytest.approx(199 * 100.0, rel=0.1)


def test_the_recent_pace_counts() -> None:
    run = PlayedRun(training={"train_iters": 1000}, validation={"eval_iters": 0})
    for number in range(300):
        run.forecast.step(0, 1.0 if number < 150 else 4.0)
    assert run.forecast.remaining_s(300, 300 * 16) == pytest.approx(700 * 4.0)


def test_the_texts() -> None:
    lines = format_size(ModelSize(1234567, 345678), 10**9, 5000).splitlines()
    assert lines[0] == "size:"
    assert [line.split()[0] for line in lines[1:]] == [
        "parameters", "parameters_on_the_fullest_rank", "tokens_to_see", "tokens_seen_before"
    ]  # fmt: skip
    assert [line.split()[-1] for line in lines[1:]] == ["1,234,567", "345,678", "1,000,000,000", "5,000"]
    assert "tokens_seen_before" not in format_size(ModelSize(1, 1), 1, 0)
    time = datetime(2030, 1, 2, 3, 4, tzinfo=timezone.utc)
    line = format_estimate(10, 499_990, 7200.0, time)
    assert line == " estimate after 10 iterations: 2.00 hours more for the other 499,990, until 2030-01-02 05:04 UTC"
    assert "30 seconds more" in format_estimate(10, 5, 30.0, time)
    for seconds in (1e13, 1e30):
        assert format_estimate(10, 5, seconds, time).endswith(" hours more for the other 5")
    for text in (line, *lines):
        assert not any(pattern.search(text) for pattern in (ITERATION, ELAPSED, TFLOPS))


def test_iterations_without_a_step_take_no_time() -> None:
    config = RunConfig.from_dict({"training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 20}})
    batches = BatchSizeSchedule(4, micro_batch_size=1, dp_size=1)
    sizes = StepSizes(batches, LengthSchedule.constant(8), SkippedIterations.parse(["11-14", "18"]))
    forecast = Forecast(config, sizes, Layout(tp=1, pp=1, dp=1, chunks=1), 20)
    for step in range(10):
        forecast.step(4 * step, 2.0)
    assert forecast.remaining_s(10, 40) == pytest.approx(2.0 * 5)

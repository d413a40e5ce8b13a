"""Training and evaluation lines, which other people's scripts read, and windows of steps."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from megatron.training.metrics import (
    Evaluation,
    MetricsWindow,
    StepMetrics,
    format_controller_lines,
    format_evaluation_lines,
    format_train_line,
    perplexity,
)
from tests.unit.training.support import Clock

WINDOW = StepMetrics(
    iteration=10,
    losses={"lm loss": 10.9876543},
    global_batch_size=96,
    seq_length=2048,
    loss_scale=4096.0,
    grad_norm=3.14159,
    consumed_samples=960,
    learning_rate=1e-4 * 960 / 216_320,
    seconds_per_iteration=5.3247,
    train_iters=3_125_000,
    benchmark_tflops=137.8912,
)


def evaluation(
    iteration: int, loss: float, samples: int | None = None, split: str = "validation", **other_losses: float
) -> Evaluation:
    losses = {"lm loss": loss, **other_losses}
    return Evaluation(iteration=iteration, consumed_samples=0, losses=losses, samples=samples, split=split)


def step(skipped: bool = False, **losses: float) -> StepMetrics:
    named_losses = {f"{name} loss": value for name, value in losses.items()}
    return StepMetrics(
        iteration=1,
        losses=named_losses,
        global_batch_size=1,
        seq_length=1,
        loss_scale=1.0,
        skipped_iterations=int(skipped),
    )


# The patterns with which the JUPITER benchmark reads a job's output.
INT, NUMBER = r"([-+]?\d+)", r"([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)"
ITERATION = re.compile(rf"iteration\s+{INT}/\s*{INT}")
TFLOPS = re.compile(rf"TFLOPs:\s+{NUMBER}")
ELAPSED = re.compile(rf"elapsed time per iteration \(s\):\s+{NUMBER}")


def test_the_line_field_for_field() -> None:
    assert format_train_line(WINDOW) == (
        " iteration       10/ 3125000 | consumed samples:          960 |"
        " elapsed time per iteration (s): 5.3247 | learning rate: 4.438E-07 |"
        " global batch size:    96 | lm loss: 1.098765E+01 | loss scale: 4096.0 |"
        " grad norm: 3.142 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        " samples per second: 18.029 | TFLOPs: 137.89 |"
    )


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, ""),
        ({"remaining_seconds": 45_000.0}, " remaining time (h): 12.50 |"),
        ({"remaining_seconds": 45_000.0, "mfu": 0.41237}, " remaining time (h): 12.50 | MFU: 41.2% |"),
        ({"mfu": 0.41237, "curriculum_seqlen": 72}, " MFU: 41.2% | curriculum seqlen:    72 |"),
        ({"curriculum_seqlen": 72, "epoch": 104 / 61}, " curriculum seqlen:    72 | epoch: 1.705 |"),
    ],
)
def test_the_benchmark_reads_a_line_with_further_fields(fields: dict[str, float], ending: str) -> None:
    changes: dict[str, Any] = fields
    line = format_train_line(dataclasses.replace(WINDOW, **changes))
    assert line == format_train_line(WINDOW) + ending
    matches = [pattern.findall(line) for pattern in (ITERATION, ELAPSED, TFLOPS)]
    assert matches == [[("10", "3125000")], ["5.3247"], ["137.89"]]


def test_a_window_counts_each_step_by_its_size() -> None:
    clock = Clock()
    window = MetricsWindow(clock)
    for samples, length in ((2, 8), (4, 8), (4, 16), (4, 16)):
        clock.now += 0.5
        window.add_step(dataclasses.replace(step(lm=1.0), global_batch_size=samples, seq_length=length))
    closed = window.close()
    assert closed.tokens_per_second == pytest.approx((16 + 32 + 64 + 64) / 2.0)
    assert closed.samples_per_second == pytest.approx(14 / 2.0)
    assert closed.mean_over_steps(lambda samples, length: length) == pytest.approx(12.0)
    assert (closed.global_batch_size, closed.seq_length) == (4, 16)


def test_optional_fields() -> None:
    line = format_train_line(dataclasses.replace(WINDOW, num_zeros=12.0, params_norm=99.5))
    assert " | grad norm: 3.142 | num zeros: 12.0 | params norm: 99.500 | number of skipped" in line
    for loss in (0.0, math.nan):
        record = dataclasses.replace(WINDOW, losses={"lm loss": loss}, grad_norm=None, skipped_iterations=10)
        line = format_train_line(record)
        assert "lm loss" not in line
        assert "grad norm" not in line
        assert " | loss scale: 4096.0 | number of skipped iterations:  10 |" in line


def test_no_other_line_matches_the_benchmarks_patterns() -> None:
    for result in (evaluation(10, 3.0), evaluation(10, 3.0, samples=480, split="test")):
        for line in format_evaluation_lines(result):
            assert not any(pattern.search(line) for pattern in (ITERATION, ELAPSED, TFLOPS))


def test_validation_lines() -> None:
    rule, line, closing = format_evaluation_lines(evaluation(1000, 2.5))
    assert line == (" validation loss at iteration 1000 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | ")
    assert rule == closing == "-" * (len(line) + 1)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_has_no_perplexity(loss: float) -> None:
    _, line, _ = format_evaluation_lines(evaluation(1000, loss, other=1.0))
    assert re.match(r" validation loss at iteration 1000 \| lm loss value: -?(NAN|INF) \| other value: 1\.0+E", line)
    assert "lm loss PPL" not in line
    assert " | other PPL: 2.718282E+00 | " in line
    assert math.isnan(perplexity(loss))


def test_final_evaluations_name_their_set_and_number_of_samples() -> None:
    for samples, split in ((160, "validation"), (80, "test")):
        _, line, _ = format_evaluation_lines(evaluation(20, 2.5, samples, split))
        start = f" validation loss at iteration 20 on {samples}-sample draw from {split} set | lm loss value: "
        assert line.startswith(start)


def test_several_sets_follow_their_mean() -> None:
    sets = {"news": {"lm loss": 2.0}, "code": {"lm loss": 3.0}}
    rule, mean, news, code, closing = format_evaluation_lines(dataclasses.replace(evaluation(10, 2.5), sets=sets))
    assert mean == format_evaluation_lines(evaluation(10, 2.5))[1]
    assert (
        news == " validation loss on news at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert code.startswith(" validation loss on code at iteration 10 | lm loss value: 3.000000E+00 | ")
    assert rule == closing == "-" * (len(news) + 1)


def test_perplexity_is_capped() -> None:
    assert perplexity(1.0) == pytest.approx(math.e)
    assert perplexity(1000.0) == math.exp(20)


def test_window_means_leave_out_skipped_iterations() -> None:
    clock = Clock()
    window = MetricsWindow(clock)
    window.add_step(step(lm=4.0, moe=1.0))
    window.add_step(step(skipped=True, lm=math.inf, moe=1.0))
    window.add_step(step(skipped=True, lm=9.0, moe=1.0))
    window.add_step(step(lm=2.0, moe=0.5))
    clock.now += 8.0
    summary = window.close()
    assert summary.losses == {"lm loss": 3.0, "moe loss": 0.75}
    assert (summary.iterations, summary.skipped_iterations, summary.nan_iterations) == (4, 2, 1)
    assert summary.seconds_per_iteration == 2.0


def test_a_window_is_reset_when_closed_and_leaves_out_pauses() -> None:
    clock = Clock()
    window = MetricsWindow(clock)
    window.add_step(step(lm=4.0))
    clock.now += 5.0
    window.close()
    window.add_step(step(lm=math.nan))
    clock.now += 1.0
    with window.paused():
        clock.now += 50.0
    clock.now += 2.0
    summary = window.close()
    assert summary.seconds_per_iteration == 3.0
    assert math.isnan(summary.losses["lm loss"])
    assert summary.nan_iterations == 1


def test_a_window_of_skipped_iterations_has_no_loss() -> None:
    window = MetricsWindow()
    window.add_step(step(skipped=True, lm=math.nan))
    assert window.close().losses == {}
    with pytest.raises(RuntimeError, match="before any iteration"):
        window.close()


def test_the_line_of_a_controller() -> None:
    assert format_controller_lines(WINDOW) == []
    figures = {"entropy": -3.256789, "rank": 64.0, "rank_of_stage_1": 0.0, "seconds_of_stage_1": 0.000123456}
    tuned = dataclasses.replace(WINDOW, iteration=20, controllers={"dp-grad": figures, "embedding": {}})
    assert format_controller_lines(tuned) == [
        " compressor of dp-grad at iteration       20 | entropy: -3.2568 | rank: 64 | rank of stage 1: 0 | "
        "seconds of stage 1: 0.00012346 |"
    ]

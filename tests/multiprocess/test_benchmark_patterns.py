"""A run's log is read by the JUPITER benchmark's patterns: a match for each log line, and none elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config.model import LM_LOSS
from megatron.training.metrics import Evaluation, StepMetrics
from megatron.training.sinks import ConsoleSink
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.jubench import matches

pytestmark = pytest.mark.multiprocess


def test_numbers_are_read_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the benchmark's own run on 384 GPUs; an evaluation in between."""
    sink = ConsoleSink(print)
    step = StepMetrics(
        iteration=430,
        train_iters=3_125_000,
        losses={LM_LOSS: 7.5},
        global_batch_size=96,
        seq_length=2048,
        loss_scale=4096.0,
        seconds_per_iteration=5.32469,
        benchmark_tflops=137.894,
        mfu=0.33,
    )
    sink.window(step)
    sink.evaluation(
        Evaluation(iteration=430, consumed_samples=41_280, losses={LM_LOSS: 7.25}, samples=480, split="test")
    )
    sink.window(replace(step, iteration=440, seconds_per_iteration=12345.6, benchmark_tflops=0.001))
    log = capsys.readouterr().out
    assert len(log.splitlines()) == 5
    assert matches("iter_pat", log) == [430, 440]
    assert matches("elp_pat", log) == [5.3247, 12345.6]
    assert matches("tflops_pat", log) == [137.89, 0.0]


@pytest.mark.slow
def test_only_log_lines_match(tmp_path: Path) -> None:
    """Of a run that prints all that there is: estimates, evaluations, checkpoints, traffic, timers."""
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        train_iters=12,
        log_interval=2,
        eval_interval=4,
        save=tmp_path / "save",
        save_interval=5,
        log_comm=True,
        log_params_norm=True,
        log_num_zeros_in_grad=True,
        timing_log_level=2,
        peak_tflops=0.5,
        log_json_file=tmp_path / "log.jsonl",
    )
    log = run_cli(1, ["pretrain_gpt.py", *flags]).check().stdout
    windows = read_events(tmp_path / "log.jsonl")
    assert len(windows) == 6
    assert len(log.splitlines()) > 40
    for text in (log, re.sub("^", "[default3]:", log, flags=re.MULTILINE)):
        assert matches("iter_pat", text) == [window["iteration"] for window in windows]
        assert matches("elp_pat", text) == [round(window["seconds_per_iteration"], 4) for window in windows]
        assert matches("tflops_pat", text) == [round(window["benchmark_tflops"], 2) for window in windows]
        assert matches("jobid", text) == []

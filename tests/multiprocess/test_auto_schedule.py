"""``--pipeline-schedule auto``: all ranks take the same order, which changes no loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.test_resume import _losses
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags

pytestmark = pytest.mark.multiprocess

ITERATIONS = 8
RUN: dict[str, Any] = {
    "num_layers": 4,
    "train_iters": ITERATIONS,
    "global_batch_size": 12,
    "hidden_dropout": 0.1,
    "compress": [
        "pp-forward=fixpoint,bits=4,rounding=stochastic,warmup=1",
        "pp-backward=lowrank,rank=2,error-feedback=lazy",
    ],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2 dp2 sharded": (4, {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "tp2 pp2 sp": (
        4,
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_a_fixed_schedule_and_the_choice_is_reported(
    layout: str, prefix: Path, tmp_path: Path
) -> None:
    """To the last digit, before and after the choice, so that a resumed run may choose another schedule."""
    world_size, parallel = LAYOUTS[layout]
    logs = {}
    for schedule in ("1f1b", "zb-h1", "auto"):
        logs[schedule] = tmp_path / f"{schedule}.jsonl"
        more = {"pipeline_max_in_flight": 6} if schedule == "auto" else {}
        flags = {**RUN, **parallel, **more, "pipeline_schedule": schedule, "log_json_file": logs[schedule]}
        result = run_cli(world_size, ["pretrain_gpt.py", *tiny_flags(prefix, **flags)])
        assert result.returncode == 0, result.stderr
    (report,) = re.findall(r"pipeline schedule: (.*)", result.stdout)
    assert re.fullmatch(
        r".+; predicted [\d.e-]+ s for the passes of a step \(.*1f1b [\d.e-]+ s.*\); measured on the slowest stage "
        r"forward [\d.e-]+ s, backward [\d.e-]+ s, weight [\d.e-]+ s, and on the slowest link [\d.e-]+ s there and "
        "back",
        report,
    )
    assert _losses(logs["auto"]) == _losses(logs["zb-h1"]) == _losses(logs["1f1b"])
    assert len(_losses(logs["auto"])) == ITERATIONS


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--pipeline-max-in-flight 3", "--pipeline-max-in-flight 3: give at least the 4 stages"),
        ("--compress pp-backward=lowrank,rank=2,when=epilogue", "when=epilogue: what it compresses depends on"),
        ("--compile on", "--compile on"),
        ("--num-layers-per-virtual-pipeline-stage 1 --num-layers 8", "needs --pipeline-schedule 1f1b, not auto"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, line: str, prefix: Path) -> None:
    flags = tiny_flags(prefix, num_layers=4, pipeline_model_parallel_size=4, pipeline_schedule="auto")
    result = run_cli(4, ["pretrain_gpt.py", *flags, *words.split()])
    assert result.returncode == 2
    assert line in result.stderr
    assert "Traceback" not in result.stderr

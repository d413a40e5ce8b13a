"""A resumed run keeps the schedule of ``--pipeline-schedule auto``, or says why it measures again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.checkpoint.plain import decode_plain, encode_plain
from megatron.parallel.pipeline.list_schedule import AUTO, MeasuredPipeline
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.training.assembly import Engines
from megatron.training.progress_state import Progress
from megatron.training.saved_run import SavedRun
from megatron.training.saved_schedule import SCHEDULE, describe_schedule, restore_schedule
from megatron.training.schedule_choice import STEPS, ScheduleChoice
from tests.multiprocess.test_resume import _losses
from tests.support.cli import CliResult, run_cli
from tests.support.corpus import tiny_flags
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]

CHOSEN = STEPS + 1
"""Iteration after the choice."""
FOUR_STAGES: Changes = {
    "model": {"num_layers": 4},
    "parallel": {"pipeline_model_parallel_size": 4, "pipeline_schedule": AUTO, "pipeline_max_in_flight": 8},
    "training": {"micro_batch_size": 1, "global_batch_size": 8},
    "compression": {"compress": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8"]},
}
ODD_TIMES = [1.1, 1.0 / 3.0, 0.7, 0.9]
"""Seconds that binary fractions do not hold."""


def _measured(with_lists: bool = True, slowest_s: float = 1.1) -> MeasuredPipeline:
    hop = Hop(0.1 / 3.0, 0.9, 0.05)
    forward_s = [slowest_s, *ODD_TIMES[1:]]
    backward_s = [2.1 * seconds for seconds in forward_s]
    pipeline = Pipeline("zb-h1", forward_s, backward_s, ODD_TIMES, 4, lambda *_: hop, ScheduleLimits(8))
    return MeasuredPipeline(pipeline, with_lists, is_final=True)


def _restore(changes: Changes, state: dict[str, Any]) -> tuple[Engines, list[str]]:
    """Engines of a run that resumes with a saved schedule, and what it says."""
    lines: list[str] = []
    engines = tiny_engines(merge(FOUR_STAGES, changes, {"checkpoint": {"load": "saved"}}))
    saved = SavedRun(3, {SCHEDULE: decode_plain(encode_plain(state))}, False, Progress(3))
    restore_schedule(engines, saved, lines.append)
    return engines, lines


def _keep(with_lists: bool) -> tuple[bool, bool, list[str], list[str], list[float], list[float]]:
    engines = tiny_engines(FOUR_STAGES)
    measured = engines.pipeline.measured = _measured(with_lists)
    losses = tiny_train(engines, 2).losses
    state = describe_schedule(engines)
    resumed, lines = _restore({}, state)
    orders = [each.pipeline.get_timetable(AUTO, count).digest for each in (engines, resumed) for count in (8, 5)]
    same_state = describe_schedule(resumed) == state
    resumed_losses = tiny_train(resumed, 2).losses
    expected = [f"pipeline schedule: keeps that of the checkpoint's run: {measured.candidates(8)[0]}"]
    needed = ScheduleChoice.is_needed(engines) or ScheduleChoice.is_needed(resumed)
    return same_state and lines == expected, needed, orders[:2], orders[2:], losses, resumed_losses


@pytest.mark.parametrize("with_lists", [True, False], ids=["a list", "a fixed schedule"])
def test_the_order_is_kept_exactly(with_lists: bool) -> None:
    """Also for another number of micro-batches than that of a full batch, which a ramp-up may have."""
    for keeps, is_needed, orders, resumed_orders, losses, resumed_losses in run_ranks(4, _keep, with_lists):
        assert keeps
        assert not is_needed
        assert orders == resumed_orders
        assert losses == resumed_losses


def _restore_changed(changes: Changes, damage: dict[str, Any]) -> tuple[bool, list[str]]:
    engines = tiny_engines(FOUR_STAGES)
    assert describe_schedule(engines) == {}
    trial = engines.pipeline.measured = _measured()
    trial.is_final = False
    assert describe_schedule(engines) == {}, "a schedule on trial is not chosen yet"
    trial.is_final = True
    resumed, lines = _restore(changes, {**describe_schedule(engines), **damage})
    return ScheduleChoice.is_needed(resumed), lines


@pytest.mark.parametrize(
    ("changes", "damage", "reason"),
    [
        ({"training": {"micro_batch_size": 2}}, {}, "--micro-batch-size differs from the checkpoint's run"),
        ({"training": {"global_batch_size": 4}}, {}, "--global-batch-size differs from the checkpoint's run"),
        ({"parallel": {"pipeline_max_in_flight": 7}}, {}, "--pipeline-max-in-flight differs from the checkpoint's run"),
        (
            {"parallel": {"pipeline_max_weight_records": 3}},
            {},
            "--pipeline-max-weight-records differs from the checkpoint's run",
        ),
        (
            {"compression": {"compress": ["pp-forward=fixpoint,bits=4"]}},
            {},
            "--compress pp-backward differs from the checkpoint's run",
        ),
        (
            {"model": {"seq_length": 8}, "compression": {"compress": ["pp-forward=cast"]}},
            {},
            "--seq-length, --compress pp-forward, --compress pp-backward differs from the checkpoint's run",
        ),
        ({}, {"digest": "0"}, "this version orders the passes differently"),
    ],
)
def test_other_conditions_are_measured_again(changes: Changes, damage: dict[str, Any], reason: str) -> None:
    for is_needed, lines in run_ranks(4, _restore_changed, changes, damage):
        assert is_needed
        assert lines == [f"pipeline schedule: measured again, since {reason}"]


def _restore_on_unlike_ranks() -> str:
    engines = tiny_engines(FOUR_STAGES)
    engines.pipeline.measured = _measured(slowest_s=40.0 if dist.get_rank() == 2 else 1.1)
    try:
        _restore({}, describe_schedule(engines))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_order_the_passes_differently_end_with_one_line() -> None:
    expected = (
        "--pipeline-schedule auto: rank 2 orders the passes of 8 micro-batches differently from rank 0; install the "
        "same versions on all nodes, or name a schedule"
    )
    assert run_ranks(4, _restore_on_unlike_ranks) == [expected] * 4


def _reports(result: CliResult) -> list[str]:
    return re.findall(r"pipeline schedule: (.*)", result.check().stdout)


def test_a_run_resumes_with_its_schedule(prefix: Path, tmp_path: Path) -> None:
    """After the choice it is kept, before the choice there is none; the losses are those without a break."""
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    plain = {"pipeline_model_parallel_size": 2, "global_batch_size": 4, "train_iters": CHOSEN + 2, "eval_iters": 0}
    auto = {**plain, "pipeline_schedule": AUTO, "save": saved}

    def run(flags: dict[str, Any]) -> CliResult:
        return run_cli(2, ["pretrain_gpt.py", *tiny_flags(prefix, **flags)])

    whole = run({**plain, "log_json_file": tmp_path / "whole.jsonl"})
    assert _reports(whole) == []
    first = run({**auto, "save_interval": 4, "exit_interval": CHOSEN, "log_json_file": log})
    reports = _reports(first)
    before = run({**auto, "save": tmp_path / "other", "load": saved, "ckpt_step": 4, "exit_interval": 5})
    assert _reports(before) == []  # still in the measured steps
    resumed = run({**auto, "load": saved, "log_json_file": log})
    (kept,) = _reports(resumed)
    stays = re.fullmatch(r".*; (.+) stays", reports[-1])
    chosen = reports[0].partition("; ")[0] if stays is None or stays[1] == "the list" else stays[1]
    assert kept == f"keeps that of the checkpoint's run: {chosen}"
    assert _losses(log) == _losses(tmp_path / "whole.jsonl")
    other = run({**auto, "load": saved, "ckpt_step": CHOSEN, "pipeline_max_in_flight": 2, "train_iters": CHOSEN + 1})
    assert _reports(other) == ["measured again, since --pipeline-max-in-flight differs from the checkpoint's run"]


def _restore_damaged(damage: dict[str, Any]) -> str:
    engines = tiny_engines(FOUR_STAGES)
    engines.pipeline.measured = _measured()
    with pytest.raises(UserError) as raised:
        _restore({}, {**describe_schedule(engines), **damage})
    return str(raised.value)


ROW = [0.1] * 10


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"times": None}, "times is missing"),
        ({"times": [ROW] * 3}, "times: expected 10 numbers of each of 4 stages"),
        ({"times": [ROW, ROW, ROW, ROW[1:]]}, "times: expected 10 numbers of each of 4 stages"),
        ({"times": [ROW, ROW, ROW, 1.0]}, "times: expected 10 numbers of each of 4 stages"),
        ({"times": [ROW, ROW, ROW, [-1.0, *ROW[1:]]]}, "times is -1.0; it must be at least 0"),
        ({"times": [ROW, ROW, ROW, ["1", *ROW[1:]]]}, "times: '1' is not a number"),
        ({"with_lists": 1}, "with_lists: 1 is neither true nor false"),
        ({"conditions": []}, "conditions: expected names and values, not a list"),
    ],
)
def test_a_damaged_schedule_is_one_line_on_every_rank(damage: dict[str, Any], problem: str) -> None:
    remedy = "load another checkpoint, or name a schedule with --pipeline-schedule"
    expected = f"--load saved, pipeline_schedule: {problem}; {remedy}"
    assert run_ranks(4, _restore_damaged, damage) == [expected] * 4

"""A resumed run keeps the schedule of ``--pipeline-schedule auto``, or says why it measures again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.checkpoint.plain import decode_plain, encode_plain
from megatron.compression.points import Point
from megatron.distributed.observer import Observer
from megatron.parallel.pipeline.list_schedule import AUTO, MeasuredPipeline
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.training import saved_schedule
from megatron.training.assembly import Engines
from megatron.training.progress_state import Progress
from megatron.training.saved_run import SavedRun
from megatron.training.saved_schedule import SCHEDULE, describe_schedule, gather_devices, restore_schedule
from megatron.training.schedule_choice import STEPS, ScheduleChoice
from tests.support.cli import CliResult, run_cli
from tests.support.corpus import tiny_flags
from tests.support.events import read_losses
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_checkpoints, tiny_engines, tiny_train

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


def _describe(engines: Engines) -> dict[str, Any]:
    return describe_schedule(engines, gather_devices(engines))


class NamedSchedules(Observer):
    """Names of the schedules that traces would show."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_schedule(self, name: str) -> None:
        self.names.append(name)


def _restore(changes: Changes, state: Any) -> tuple[Engines, list[str], list[str]]:
    """Engines of a run that resumes with a saved schedule, what it says, and the names of its schedules in traces."""
    lines: list[str] = []
    schedules = NamedSchedules()
    engines = tiny_engines(merge(FOUR_STAGES, changes, {"checkpoint": {"load": "saved"}}))
    saved = SavedRun(3, {SCHEDULE: decode_plain(encode_plain(state))}, Progress(3))
    engines.ledger.observers.append(schedules)
    restore_schedule(engines, saved, False, lines.append)
    return engines, lines, schedules.names


def _keep(with_lists: bool) -> tuple[bool, bool, list[str], list[str], list[float], list[float]]:
    engines = tiny_engines(FOUR_STAGES)
    measured = engines.pipeline.measured = _measured(with_lists)
    losses = tiny_train(engines, 2).losses
    state = _describe(engines)
    resumed, lines, names = _restore({}, state)
    assert names == [str(measured.candidates(8)[0])]
    orders = [each.pipeline.get_timetable(AUTO, count).digest for each in (engines, resumed) for count in (8, 5)]
    same_state = _describe(resumed) == state
    resumed_losses = tiny_train(resumed, 2).losses
    order = measured.candidates(8)[0]
    expected = [f"pipeline schedule: keeps that of the checkpoint's run; with 8 micro-batches, {order}"]
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


def _restore_changed(
    changes: Changes, damage: dict[str, Any], replaced_by: str | None = None
) -> tuple[bool, list[str]]:
    """Whether a run with changes must measure again, and what it says.

    ``replaced_by`` is the spec that has replaced that of pp-forward; empty for none.
    """
    engines = tiny_engines(FOUR_STAGES)
    assert _describe(engines) == {}
    trial = engines.pipeline.measured = _measured()
    trial.is_final = False
    assert _describe(engines) == {}, "a schedule on trial is not chosen yet"
    trial.is_final = True
    if replaced_by is not None:
        spec = engines.plan.specs[Point.PP_FWD] if replaced_by else None
        engines.plan.substitute(Point.PP_FWD, spec, replaced_by)
    state = _describe(engines)
    conditions = {**state["conditions"], **damage.pop("conditions", {})}
    resumed, lines, names = _restore(changes, {**state, "conditions": conditions, **damage})
    assert not names
    return ScheduleChoice.is_needed(resumed), lines


def _compress(*specs: str) -> Changes:
    return {"compression": {"compress": list(specs)}}


BOTH = ("pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8")
CHANGED: list[tuple[Changes, dict[str, Any], str]] = [
    ({"training": {"micro_batch_size": 2}}, {}, "--micro-batch-size"),
    ({"training": {"global_batch_size": 4}}, {}, "--global-batch-size"),
    ({"parallel": {"pipeline_max_in_flight": 7}}, {}, "--pipeline-max-in-flight"),
    ({"parallel": {"pipeline_max_weight_records": 3}}, {}, "--pipeline-max-weight-records"),
    ({"precision": {"bf16": True}}, {}, "--accumulate-allreduce-grads-in-fp32, --bf16"),
    (
        {"recompute": {"recompute_granularity": "full"}},
        {},
        "--recompute-granularity, --recompute-method",
    ),
    (_compress(BOTH[0]), {}, "--compress pp-backward"),
    (_compress(*BOTH, "tp-forward=cast"), {}, "--compress tp-forward"),
    (
        {"model": {"seq_length": 8}, **_compress("pp-forward=cast")},
        {},
        "--seq-length, --compress pp-forward, --compress pp-backward",
    ),
    ({}, {"conditions": {"the number of ranks": 8}}, "the number of ranks"),
    ({}, {"conditions": {"the devices": ["cpu", "NVIDIA H100"]}}, "the devices"),
]


@pytest.mark.parametrize(("changes", "damage", "names"), CHANGED, ids=[names for *_, names in CHANGED])
def test_other_conditions_are_measured_again(changes: Changes, damage: dict[str, Any], names: str) -> None:
    expected = f"pipeline schedule: measured again, since {names}: other values than in the checkpoint's run"
    for is_needed, lines in run_ranks(4, _restore_changed, changes, damage):
        assert is_needed
        assert lines == [expected]


@pytest.mark.parametrize("replaced_by", ["", "pp-forward=fixpoint,bits=8"])
def test_a_compressor_that_was_replaced_is_another_condition(replaced_by: str) -> None:
    for is_needed, (line,) in run_ranks(4, _restore_changed, {}, {}, replaced_by):
        assert is_needed
        assert "since --compress pp-forward: other values" in line


def test_an_order_of_another_version_is_measured_again() -> None:
    for is_needed, lines in run_ranks(4, _restore_changed, {}, {"digest": "0"}):
        assert is_needed
        assert lines == ["pipeline schedule: measured again, since the saved times give another order in this version"]


def _restore_on_unlike_devices() -> tuple[bool, bool]:
    """Whether a schedule is kept on the devices that it was measured on, two of one kind and two of another; and
    whether it is kept if the third rank has another device."""
    devices = ["A", "A", "B", "B"]
    rank = dist.get_rank()
    names = SimpleNamespace(get_device_name=lambda device: devices[rank])
    saved_schedule.torch = SimpleNamespace(cuda=names)  # type: ignore[assignment]

    def on_gpu(engines: Engines) -> Engines:
        return replace(engines, topology=replace(engines.topology, device=torch.device("cuda")))

    engines = on_gpu(tiny_engines(FOUR_STAGES))
    engines.pipeline.measured = _measured()
    saved = SavedRun(3, {SCHEDULE: _describe(engines)}, Progress(3))
    kept = []
    for _ in range(2):
        resumed = on_gpu(tiny_engines(merge(FOUR_STAGES, {"checkpoint": {"load": "saved"}})))
        restore_schedule(resumed, saved, False, lambda line: None)
        kept.append(resumed.pipeline.measured is not None)
        devices[2] = "A"
    return kept[0], kept[1]


def test_all_ranks_decide_alike_on_unlike_devices() -> None:
    assert run_ranks(4, _restore_on_unlike_devices) == [(True, False)] * 4


def _describe_on_rank_0() -> list[str]:
    """Names of a checkpoint's values, on the first rank alone, as an island sends them to another."""
    engines = tiny_engines(FOUR_STAGES)
    engines.pipeline.measured = _measured()
    parts = tiny_checkpoints(engines).stateful_parts
    return list(parts.state_dict()) if dist.get_rank() == 0 else []


def test_a_single_rank_can_describe_the_schedule() -> None:
    (names, *_) = run_ranks(4, _describe_on_rank_0)
    assert SCHEDULE in names


def _restore_after_a_choice() -> tuple[bool, list[str]]:
    engines, lines = tiny_engines(FOUR_STAGES), list[str]()
    engines.pipeline.measured = _measured()
    saved = SavedRun(3, {SCHEDULE: _describe(engines)}, Progress(3))
    resumed = tiny_engines(merge(FOUR_STAGES, {"checkpoint": {"load": "saved"}}))
    restore_schedule(resumed, saved, True, lines.append)
    return ScheduleChoice.is_needed(resumed), lines


def test_a_run_that_chooses_its_compressors_again_measures_again() -> None:
    for is_needed, lines in run_ranks(4, _restore_after_a_choice):
        assert is_needed
        assert lines == ["pipeline schedule: measured again, since --compress auto has chosen again"]


def _restore_on_unlike_ranks() -> str:
    engines = tiny_engines(FOUR_STAGES)
    engines.pipeline.measured = _measured(slowest_s=40.0 if dist.get_rank() == 2 else 1.1)
    try:
        _restore({}, _describe(engines))
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
    assert kept == f"keeps that of the checkpoint's run; with 4 micro-batches, {chosen}"
    assert read_losses(log) == read_losses(tmp_path / "whole.jsonl")
    other = run({**auto, "load": saved, "ckpt_step": CHOSEN, "pipeline_max_in_flight": 2, "train_iters": CHOSEN + 1})
    assert _reports(other) == [
        "measured again, since --pipeline-max-in-flight: other values than in the checkpoint's run"
    ]


def _restore_damaged(damage: Any) -> str:
    engines = tiny_engines(FOUR_STAGES)
    engines.pipeline.measured = _measured()
    with pytest.raises(UserError) as raised:
        _restore({}, {**_describe(engines), **damage} if isinstance(damage, dict) else damage)
    return str(raised.value)


ROW = [0.1] * 10


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"times": None}, "times is missing"),
        ({"times": [ROW] * 3}, "times: expected 10 numbers of each of 4 stages"),
        ({"times": [ROW, ROW, ROW, ROW[1:]]}, "times: expected 10 numbers of each of 4 stages"),
        ({"times": [ROW, ROW, ROW, 1.0]}, "times: expected 10 numbers of each of 4 stages"),
        ({"times": [ROW, ROW, ROW, [-1.0, *ROW[1:]]]}, "times is -1.0; it must be at least 0 and at most 1e+06"),
        ({"times": [ROW, ROW, ROW, ["1", *ROW[1:]]]}, "times: '1' is not a number"),
        ({"with_lists": 1}, "with_lists: 1 is neither true nor false"),
        ({"conditions": []}, "conditions: expected names and values, not a list"),
        ({"digest": None}, "digest is missing"),
        ({"times": [ROW, ROW, ROW, [1e300, *ROW[1:]]]}, "times is 1e+300; it must be at least 0 and at most 1e+06"),
        ([1], "pipeline_schedule: expected names and values, not a list"),
    ],
)
def test_a_damaged_schedule_is_one_line_on_every_rank(damage: Any, problem: str) -> None:
    remedy = "load another checkpoint, or name a schedule with --pipeline-schedule"
    expected = f"--load saved, pipeline_schedule: {problem}; {remedy}"
    assert run_ranks(4, _restore_damaged, damage) == [expected] * 4

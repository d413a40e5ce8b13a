"""``--pipeline-schedule auto``: all ranks take the same order, which changes no loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.distributed.clock import HostClock, Mark, Tell
from megatron.parallel.pipeline.list_schedule import AUTO, MeasuredPipeline
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.parallel.pipeline.timetable import MAX_POSTED_AHEAD
from megatron.training.assembly import Engines
from megatron.training.schedule_choice import STEPS, ScheduleChoice
from tests.support.cli import run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.events import read_losses
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_engines, tiny_run, tiny_train

pytestmark = pytest.mark.multiprocess

ITERATIONS = 1 + STEPS + 2
"""After a warm-up of one."""
RUN: dict[str, Any] = {
    "num_layers": 4,
    "train_iters": ITERATIONS,
    "global_batch_size": 8,
    "hidden_dropout": 0.1,
    "compress": [
        "pp-forward=fixpoint,bits=4,rounding=stochastic,warmup=1",
        "pp-backward=lowrank,rank=2,error-feedback=lazy",
    ],
}
FOUR_STAGES: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 4},
    "parallel": {"pipeline_model_parallel_size": 4, "pipeline_schedule": AUTO, "pipeline_max_in_flight": 8},
    "training": {"micro_batch_size": 1, "global_batch_size": 8},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2 dp2 sharded": (4, {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "tp2 pp2 sp": (
        4,
        {
            "num_layers": 2,  # few messages: four ranks wait for each other at each
            "global_batch_size": 4,
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
}


@pytest.mark.parametrize("layout", mark_repeats(LAYOUTS, keep=["pp4", "tp2 pp2 sp"]))
def test_losses_are_those_of_a_fixed_schedule_and_the_choice_is_reported(
    layout: str, prefix: Path, tmp_path: Path
) -> None:
    """To the last digit, before and after the choice, so that a resumed run may measure again."""
    world_size, parallel = LAYOUTS[layout]
    logs = {}
    for schedule in ("1f1b", "zb-h1", "auto"):
        logs[schedule] = tmp_path / f"{schedule}.jsonl"
        more: dict[str, Any] = {}
        if schedule == "auto":
            steps = {"profile_step_start": ITERATIONS - 1, "profile_step_end": ITERATIONS}
            more = {"pipeline_max_in_flight": 8, "profile_trace": tmp_path / "traces", **steps}
        flags = {**RUN, **parallel, **more, "pipeline_schedule": schedule, "log_json_file": logs[schedule]}
        result = run_cli(world_size, ["pretrain_gpt.py", *tiny_flags(prefix, **flags)])
        assert result.returncode == 0, result.stderr
        records = re.findall(
            r"weight gradients: up to (\d+) backward passes of a stage wait .* in about [\d.]+ kB of", result.stdout
        )
        stages, replicas = parallel["pipeline_model_parallel_size"], 2 if "dp2" in layout else 1
        # Lists may hold as many as --pipeline-max-in-flight allows, here all micro-batches.
        expected = {"1f1b": [], "zb-h1": [stages], "auto": [flags["global_batch_size"] // replicas]}
        assert records == [str(count) for count in expected[schedule]]
    report, *later_reports = re.findall(r"pipeline schedule: (.*)", result.stdout)
    assert re.fullmatch(
        r".+; predicted [\d.e-]+ s for the passes of a step \(.*1f1b [\d.e-]+ s.*\); measured on the slowest stage "
        r"forward [\d.e-]+ s, backward [\d.e-]+ s, weight [\d.e-]+ s, and on the slowest link [\d.e-]+ s there and "
        "back",
        report,
    )
    assert "gpipe" in report  # all micro-batches fit into the limit
    traces = sorted((tmp_path / "traces").glob("*.json"))
    titles = {json.loads(path.read_text())["otherData"]["schedule"] for path in traces}
    assert len(traces) == world_size
    name = report.partition("; ")[0]
    if name.startswith("a list"):
        (later_report,) = later_reports
        times = re.fullmatch(
            r"steps take [\d.e-]+ s with the list, [\d.e-]+ s with (\S+); (?:the list|\1) stays", later_report
        )
        assert times is not None, later_report
        name = name if "the list stays" in later_report else times[1]
    else:
        assert later_reports == []
    assert titles == {f"auto: {name}"}
    assert read_losses(logs["auto"]) == read_losses(logs["zb-h1"]) == read_losses(logs["1f1b"])
    assert len(read_losses(logs["auto"])) == ITERATIONS


def _train_by_a_list() -> tuple[str, bool, int, list[float]]:
    """Trains by the schedule for made-up times: its kind, whether it is zb-h1's, receives ahead, and losses."""
    engines = tiny_engines(FOUR_STAGES)
    hop = Hop(0.0, 1.0, 0.05)
    pipeline = Pipeline("1f1b", [1.0] * 4, [2.0] * 4, [1.0] * 4, 4, lambda *_: hop)
    engines.pipeline.measured = measured = MeasuredPipeline(pipeline)
    losses = tiny_train(engines, 3).losses
    table = engines.pipeline.get_timetable(AUTO, 8)
    fixed = engines.pipeline.get_timetable("zb-h1", 8).schedules
    return measured.candidates(8)[0].kind, table.schedules == fixed, table.max_ahead, losses


def _train_by_zero_bubble(iterations: int) -> list[float]:
    return tiny_run(merge(FOUR_STAGES, {"parallel": {"pipeline_schedule": "zb-h1"}}), iterations).losses


def test_a_list_gives_the_losses_of_a_fixed_schedule() -> None:
    """A list that differs from the fixed schedules, with messages far ahead, runs on four ranks."""
    results = run_ranks(4, _train_by_a_list)
    for kind, is_fixed, max_ahead, _ in results:
        assert (kind, is_fixed) == (AUTO, False)
        assert max_ahead > MAX_POSTED_AHEAD
    assert results[3][3] == run_ranks(4, _train_by_zero_bubble, 3)[3]


def _train_with_trials(
    list_s: float, fixed_s: float, steps: int = 16, changed_from: int = 99, changed_count: int = 8
) -> tuple[list[str], list[str], list[float], bool]:
    """Trains with made-up times of passes, for which a list is predicted to be fastest, and made-up times of steps.
    From step ``changed_from`` on, the choice is told shorter samples, and ``changed_count`` micro-batches.

    Returns the schedule after each step, the reports, the losses, and whether the steps are at last those of eager-1f1b
    by its name, with as many receives ahead.
    """
    engines = tiny_engines(FOUR_STAGES)
    hop = Hop(0.0, 1.0, 0.05)
    measured = MeasuredPipeline(Pipeline("1f1b", [1.0] * 4, [2.0] * 4, [1.0] * 4, 4, lambda *_: hop))
    choice = ScheduleChoice(engines, settling_steps=1, measured_steps=1, trial_rounds=3)
    choice._measure = lambda micro_batches: (measured, "measured")  # type: ignore[method-assign]
    kinds = ["first"]
    reports: list[str] = []

    class SetClock(HostClock):
        """Steps take 0.1 s more on each later rank; the first after a change, and the tenth, take very long."""

        def between(self, start: Mark, stop: Mark, tell: Tell) -> None:
            is_slow = len(kinds) in (1, 10) or kinds[-1] != kinds[-2]
            tell((list_s if kinds[-1] == AUTO else fixed_s) + 0.1 * engines.topology.rank + 10.0 * is_slow)

    engines.ledger.clock = SetClock()

    def after_step(engines: Engines) -> None:
        if choice.is_due:
            is_changed = len(kinds) >= changed_from
            choice.decide(changed_count if is_changed else 8, 16 if is_changed else 32, reports.append)
        schedule = engines.pipeline.measured
        kinds.append("first" if schedule is None else schedule.candidates(8)[0].kind)

    losses = tiny_train(engines, steps, after_step=after_step).losses
    is_eager = engines.pipeline.get_timetable(AUTO, 8) is engines.pipeline.get_timetable("eager-1f1b", 8)
    return kinds[1:], reports, losses, is_eager


@pytest.mark.parametrize(("list_s", "stays"), [(2.0, "the list"), (3.1, "eager-1f1b")])
def test_the_faster_of_the_list_and_the_fastest_fixed_schedule_stays(list_s: float, stays: str) -> None:
    """Three steps are timed with each, in turn, each after one that does not count; the medians decide."""
    results = run_ranks(4, _train_with_trials, list_s, 3.0)
    for kinds, reports, _, is_eager in results:
        assert is_eager == (stays == "eager-1f1b")
        later = AUTO if stays == "the list" else "eager-1f1b"
        assert kinds == ["first", *[AUTO, AUTO, "eager-1f1b", "eager-1f1b"] * 3, *[later] * 3]
        assert reports == [
            "measured",
            f"pipeline schedule: steps take {list_s + 0.3:.3g} s with the list, 3.3 s with eager-1f1b; {stays} stays",
        ]
    assert results[3][2] == run_ranks(4, _train_by_zero_bubble, 16)[3]


def test_only_steps_of_the_same_size_are_compared() -> None:
    """When samples get shorter in the third turn, the list's, the rounds start over."""
    for kinds, reports, _, _ in run_ranks(4, _train_with_trials, 2.0, 3.0, 22, 8):
        assert kinds == ["first", *[AUTO, AUTO, "eager-1f1b", "eager-1f1b", AUTO, AUTO],
                         *[AUTO, AUTO, "eager-1f1b", "eager-1f1b"] * 3, *[AUTO] * 3]  # fmt: skip
        assert len(reports) == 2


def test_the_trial_ends_when_a_fixed_schedule_is_fastest_for_the_new_size() -> None:
    """One micro-batch leaves nothing to order."""
    for kinds, reports, _, _ in run_ranks(4, _train_with_trials, 2.0, 3.0, 14, 8, 1):
        assert kinds == ["first", AUTO, AUTO, "eager-1f1b", "eager-1f1b", *[AUTO] * 9]
        assert reports == ["measured"]


def _steps_until_due() -> list[bool]:
    """Whether the choice is due after each step, beside a compressor with a warm-up of five steps."""
    specs: dict[str, dict[str, Any]] = {"compression": {"compress": ["pp-forward=fixpoint,bits=4,warmup=5"]}}
    engines = tiny_engines(merge(FOUR_STAGES, specs))
    choice, is_due = ScheduleChoice(engines, settling_steps=1, measured_steps=2, trial_rounds=0), list[bool]()
    tiny_train(engines, 8, after_step=lambda _: is_due.append(choice.is_due))
    return is_due


def test_steps_are_measured_after_the_warm_ups() -> None:
    assert run_ranks(4, _steps_until_due) == [[False] * 7 + [True]] * 4


def _measure_made_up_passes() -> tuple[list[list[float]], str]:
    choice = ScheduleChoice(engines := tiny_engines(FOUR_STAGES))
    rank = engines.topology.rank
    choice._seconds = {"forward": [0.2 + rank], "backward": [9.0, 0.5, 0.1], "weight": [0.25 * (rank > 0)]}
    measured, report = choice._measure(8)
    pipeline = measured.pipeline
    return [list(seconds) for seconds in (pipeline.forward_s, pipeline.backward_s, pipeline.weight_s)], report


def test_measured_passes_become_times_of_a_pipeline() -> None:
    """Medians; the first stage's backward pass has computed its weight gradients."""
    expected = [[0.2, 1.2, 2.2, 3.2], [0.5, 0.75, 0.75, 0.75], [0.0, 0.25, 0.25, 0.25]]
    for times, report in run_ranks(4, _measure_made_up_passes):
        assert times == expected
        assert "measured on the slowest stage forward 3.2 s, backward 0.5 s, weight 0.25 s, and on" in report


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--pipeline-max-in-flight 3", "--pipeline-max-in-flight 3: give at least the 4 stages"),
        (
            "--pipeline-schedule eager-1f1b --pipeline-max-in-flight 3",
            "--pipeline-max-in-flight 3: give at least the 4 stages",
        ),
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

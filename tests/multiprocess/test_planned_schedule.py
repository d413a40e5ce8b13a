"""``--pipeline-cluster``: all ranks start with the order that the planner predicts to be fastest, which is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.parallel.pipeline.list_schedule import AUTO, rank_schedules
from megatron.parallel.pipeline.schedule import Pass
from megatron.planner.choice import make_choice
from megatron.planner.cluster import read_cluster
from megatron.planner.costs import wires_of
from megatron.planner.predict import Predictor
from megatron.training.planned_schedule import check_pipeline_cluster, plan_schedule
from megatron.training.schedule_choice import ScheduleChoice
from megatron.training.weight_records import estimate_records
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags
from tests.support.events import read_losses
from tests.support.spawn import run_ranks
from tests.support.tiny import T5, merge, tiny_config, tiny_engines

pytestmark = pytest.mark.multiprocess

DEVICE = "device: {peak_tflops: 0.001, efficiency: 1.0, memory_gib: 4, memory_gbyte_per_s: 1, op_us: 0.001}\n"
FAST_LINKS = "gpus: 4\ngpus_per_node: 1\n" + DEVICE + "across: {gbit_per_s: 100, latency_us: 1}\n"
SLOW_LINKS = FAST_LINKS.replace("gbit_per_s: 100", "gbit_per_s: 0.001")


def _four_stages(path: Path) -> dict[str, dict[str, Any]]:
    return {
        "model": {"num_layers": 4},
        "parallel": {
            "pipeline_model_parallel_size": 4, "pipeline_schedule": AUTO, "pipeline_max_in_flight": 8,
            "pipeline_cluster": str(path),
        },
        "training": {"micro_batch_size": 1, "global_batch_size": 8},
    }  # fmt: skip


def _plan(path: Path) -> tuple[bool, list[str], list[str], list[str]]:
    engines, lines = tiny_engines(_four_stages(path)), list[str]()
    plan_schedule(engines, lines.append)
    order = engines.pipeline.get_timetable(AUTO, 8)
    cluster, stage = read_cluster(path), engines.topology.coordinates.pp
    predictor = Predictor(engines.config, cluster, engines.vocab_size)
    choice = make_choice(engines.config, cluster.gpus)
    pipeline = predictor.pipeline(choice, wires_of(cluster, choice))
    fastest = rank_schedules(pipeline, 8)[0]
    ops = [str(op) for op in fastest.schedules(pipeline, 8)[stage]]
    used = engines.pipeline.measured
    assert used is not None
    used_ops = [str(op) for op in used.schedules(8)[stage]]
    assert order.digest
    return ScheduleChoice.is_needed(engines), lines, used_ops, ops


def test_the_order_is_that_of_the_planner(tmp_path: Path) -> None:
    """On every stage, and another one on other links."""
    orders = {}
    for name, text in (("fast", FAST_LINKS), ("slow", SLOW_LINKS)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        ranks = run_ranks(4, _plan, path)
        for is_needed, lines, used_ops, ops in ranks:
            assert not is_needed
            assert used_ops == ops
            assert len(lines) == 1
            assert lines[0].endswith(f", by the planner's times for {path}")
        orders[name] = [used_ops for _, _, used_ops, _ in ranks]
    assert orders["fast"] != orders["slow"]


def test_a_run_starts_with_the_planned_order_and_keeps_it(prefix: Path, tmp_path: Path) -> None:
    """Losses are those of 1F1B to the last digit. A resumed run plans again only for another file."""
    for name, text in (("fast", FAST_LINKS), ("slow", SLOW_LINKS)):
        (tmp_path / f"{name}.yaml").write_text(text)
    run = {"num_layers": 4, "global_batch_size": 8, "pipeline_model_parallel_size": 4, "train_iters": 4}
    auto = {"pipeline_schedule": AUTO, "pipeline_max_in_flight": 8}

    def train(log: str, **flags: Any) -> str:
        argv = tiny_flags(prefix, **{**run, "log_json_file": tmp_path / log, **flags})
        return run_cli(4, ["pretrain_gpt.py", *argv]).check().stdout

    train("1f1b.jsonl")
    folder = tmp_path / "saved"
    fast, slow = ({**auto, "pipeline_cluster": tmp_path / f"{name}.yaml"} for name in ("fast", "slow"))
    planned = train("first.jsonl", **fast, save=folder, exit_interval=2)
    assert re.findall(r"^pipeline schedule: (\S+)", planned, re.M)
    assert "by the planner's times" in planned
    assert "measured on the slowest stage" not in planned
    resumed = train("second.jsonl", **fast, load=folder)
    assert "pipeline schedule: keeps that of the checkpoint's run" in resumed
    assert "by the planner's times" not in resumed
    losses = {**read_losses(tmp_path / "first.jsonl"), **read_losses(tmp_path / "second.jsonl")}
    assert losses == read_losses(tmp_path / "1f1b.jsonl")
    other = train("third.jsonl", **slow, load=folder)
    assert "pipeline schedule: planned again, since --pipeline-cluster: other values than in the" in other
    assert "by the planner's times" in other


def test_another_cluster_in_the_same_file_is_planned_again(prefix: Path, tmp_path: Path) -> None:
    path, folder = tmp_path / "cluster.yaml", tmp_path / "saved"
    flags = {
        "pipeline_model_parallel_size": 2, "pipeline_schedule": AUTO, "pipeline_cluster": path, "train_iters": 2,
    }  # fmt: skip
    path.write_text("device: {peak_tflops: 1}\n")

    def train(**more: Any) -> str:
        return run_cli(2, ["pretrain_gpt.py", *tiny_flags(prefix, **flags, **more)]).check().stdout

    first = train(save=folder, exit_interval=1)
    assert re.search(r"^note: .* lacks some rates; these defaults are assumed: device efficiency", first, re.M)
    path.write_text("device: {peak_tflops: 2}\n")
    assert "pipeline schedule: planned again, since --pipeline-cluster: other values" in train(load=folder)


def _count_records(path: Path) -> tuple[float, int]:
    """Estimated number of backward passes whose weight gradients wait, and that in the planned order."""
    engines, waiting, most = tiny_engines(_four_stages(path)), 0, 0
    plan_schedule(engines, lambda line: None)
    assert engines.pipeline.measured is not None
    ops = engines.pipeline.measured.schedules(8)[engines.topology.coordinates.pp]
    has_weight_passes = any(op.computation is Pass.WEIGHT for op in ops)
    for op in ops:
        waiting += (op.computation is Pass.BACKWARD and has_weight_passes) - (op.computation is Pass.WEIGHT)
        most = max(most, waiting)
    return estimate_records(engines)[0], most


def test_records_are_those_of_the_planned_order(tmp_path: Path) -> None:
    """Not as many as the limits of auto allow."""
    path = tmp_path / "cluster.yaml"
    path.write_text(SLOW_LINKS)
    ranks = run_ranks(4, _count_records, path)
    assert all(estimated == most for estimated, most in ranks)
    assert max(most for _, most in ranks) < 8


PROBLEMS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    "no device": ("gpus: 4\n", {}, "no device; add device: "),
    "no number": (FAST_LINKS.replace("gbit_per_s: 100", "gbit_per_s: many"), {}, "gbit_per_s must be a positive"),
    "t5": (FAST_LINKS, T5, "--pipeline-cluster: the planner does not know t5 models"),
    "recomputation": (
        FAST_LINKS,
        {"recompute": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}},
        "--recompute-method block and --recompute-num-layers are not planned",
    ),
    "auto": (FAST_LINKS, {"compression": {"compress": ["auto"]}}, "--compress auto measures the links"),
    "endless": (json.dumps({"device": {"peak_tflops": 10**400}}), {}, "must be a positive"),
    "sites of the run": (FAST_LINKS.replace("gpus: 4", "gpus: 6") + "sites: 3\n", {}, "do not divide into equal sites"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_cluster_that_cannot_be_planned_is_one_error(problem: str, tmp_path: Path) -> None:
    text, changes, expected = PROBLEMS[problem]
    path = tmp_path / f"cluster.{'json' if text.startswith('{') else 'yaml'}"
    path.write_text(text)
    config = tiny_config(merge(_four_stages(path), changes), 4)
    with pytest.raises(UserError, match=re.escape(expected)):
        check_pipeline_cluster(config, 4)


def test_a_flag_without_an_effect_is_not_checked(tmp_path: Path) -> None:
    for parallel in ({"pipeline_schedule": "1f1b"}, {"pipeline_model_parallel_size": 1}):
        changes = merge(_four_stages(tmp_path / "none.yaml"), {"parallel": parallel})
        check_pipeline_cluster(tiny_config(merge(changes, {"parallel": {"pipeline_max_in_flight": None}}), 4), 4)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cluster.yaml"),
        ("gpus: 2\n", "no device; add device"),
        (FAST_LINKS.replace("gbit_per_s: 100", "gbit_per_s: 1.0e-12"), "takes over 1e+06 s; correct them"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_run(
    content: str | None, problem: str, prefix: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_text(content)
    flags = {"num_layers": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": AUTO}
    result = run_cli(2, ["pretrain_gpt.py", *tiny_flags(prefix, **flags, pipeline_cluster=path)])
    assert result.returncode != 0
    assert problem in result.stderr
    assert "Traceback" not in result.stderr

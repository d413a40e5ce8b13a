"""The schedule of ``--pipeline-schedule auto`` by predicted times of passes and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.config.run import RunConfig
from megatron.distributed.agreement import run_together, take_from_rank_0
from megatron.parallel.pipeline.list_schedule import AUTO, MeasuredPipeline
from megatron.planner.choice import Choice, check_planned, make_choice
from megatron.planner.cluster import Cluster, check_sites, format_assumed_rates, read_cluster
from megatron.planner.costs import wires_of
from megatron.planner.predict import Predictor
from megatron.training.assembly import Engines
from megatron.training.schedule_choice import (
    MAX_SECONDS,
    ScheduleChoice,
    StageTimes,
    describe_candidates,
    list_times,
    make_pipeline,
    use_schedule,
)
from megatron.training.step import count_micro_batches


def check_pipeline_cluster(config: RunConfig, world_size: int) -> None:
    """Check that the planner can predict a run on the cluster of ``--pipeline-cluster``.

    Args:
        config: resolved configuration.
        world_size: number of processes of an island.

    Raises:
        UserError: when it cannot.
    """
    path, remedy = config.parallel.pipeline_cluster, "leave the flag out, to measure the first steps"
    if path is None or config.parallel.pipeline_schedule != AUTO or config.parallel.pipeline_model_parallel_size == 1:
        return
    if config.compression.is_auto:
        raise UserError("--pipeline-cluster: --compress auto measures the links, and plans for these; leave one out")
    check_planned(config, world_size * config.islands.islands, "--pipeline-cluster", remedy)
    format_assumed_rates(path, _read_cluster(config, world_size))  # which checks that there is a device


def plan_schedule(engines: Engines, log: Callable[[str], None]) -> None:
    """Use the schedule that the planner predicts to be fastest on the cluster of ``--pipeline-cluster``, if the run has
    none yet. A collective call.

    Raises:
        UserError: on every rank, when the run cannot be predicted, or ranks order the passes differently.
    """
    config, topology = engines.config, engines.topology
    path = config.parallel.pipeline_cluster
    if path is None or not ScheduleChoice.is_needed(engines):
        return
    group, world_size = topology.control.pg, topology.layout.world_size

    def predict() -> tuple[StageTimes, dict[str, Any]]:
        if topology.rank != 0:
            return [], {}
        cluster = _read_cluster(config, world_size)
        if note := format_assumed_rates(path, cluster):
            log(note.rstrip())
        times = _predict_times(make_choice(config, cluster.gpus), Predictor(config, cluster, engines.vocab_size))
        if not all(0.0 <= seconds <= MAX_SECONDS for row in times for seconds in row):
            raise UserError(
                f"--pipeline-cluster: by the rates in {path}, a pass or a message takes over {MAX_SECONDS:g} s; "
                "correct them"
            )
        return times, asdict(cluster)

    times, description = take_from_rank_0(group, run_together(group, predict))
    micro_batches = count_micro_batches(engines)
    schedule = MeasuredPipeline(make_pipeline(times, engines.pipeline.limits), is_final=True, cluster=description)
    use_schedule(engines, schedule, micro_batches)
    log(f"pipeline schedule: {describe_candidates(schedule, micro_batches)}, by the planner's times for {path}")


def describe_cluster(config: RunConfig, world_size: int) -> dict[str, Any] | None:
    """Describe the cluster of ``--pipeline-cluster``; None without the flag.

    Raises:
        UserError: when the file cannot be read.
    """
    return None if config.parallel.pipeline_cluster is None else asdict(_read_cluster(config, world_size))


def predict_stages(
    group: dist.ProcessGroup | None, choices: Sequence[Choice], predictor: Predictor
) -> list[StageTimes | None]:
    """Predict the times of the stages with each choice whose schedule depends on them, None with others. A collective
    call: all ranks get the times of rank 0."""
    times = [_predict_times(choice, predictor) if choice.schedule == AUTO else None for choice in choices]
    return take_from_rank_0(group, times)


def _predict_times(choice: Choice, predictor: Predictor) -> StageTimes:
    return list_times(predictor.pipeline(choice, wires_of(predictor.cluster, choice)))


def _read_cluster(config: RunConfig, world_size: int) -> Cluster:
    """Read the cluster, with as many devices as the run has."""
    assert config.parallel.pipeline_cluster is not None
    cluster = replace(read_cluster(config.parallel.pipeline_cluster), gpus=world_size * config.islands.islands)
    check_sites(cluster)
    return cluster

"""Predictions of ``--pipeline-schedule auto``, against the fixed schedules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.parallel.pipeline.list_schedule import AUTO, ListPipeline, rank_schedules
from megatron.parallel.pipeline.schedule import Pass
from megatron.planner.choice import make_choice, resolve_for_planning
from megatron.planner.costs import wires_of
from megatron.planner.predict import Predictor
from tests.unit.planner.support import CLUSTER, predictor_of, small_run

STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 4}


def _predictor(gbit_per_s: float, micro_batches: int, **parallel: Any) -> tuple[Predictor, Any]:
    link = dataclasses.replace(CLUSTER.across, gbit_per_s=gbit_per_s)
    nodes = dataclasses.replace(CLUSTER, gpus=4, gpus_per_node=1, across=link)
    config = small_run(
        4,
        model={"hidden_size": 256, "num_layers": 8},
        parallel=STAGES | parallel,
        training={"global_batch_size": micro_batches},
    )
    return predictor_of(config, nodes)


@pytest.mark.parametrize("gbit_per_s", [0.1, 2.0, 100.0])
@pytest.mark.parametrize("micro_batches", [3, 8, 600])
def test_auto_is_as_fast_as_the_fastest_schedule_within_its_limit(gbit_per_s: float, micro_batches: int) -> None:
    predictor, choice = _predictor(gbit_per_s, micro_batches)
    seconds = {
        kind: predictor.predict(dataclasses.replace(choice, schedule=kind)).seconds
        for kind in ("1f1b", "zb-h1", "eager-1f1b", AUTO)
    }
    # Fixed schedules of long steps are extrapolated in another way.
    assert seconds[AUTO] <= min(seconds.values()) * (1.0 + (1e-9 if micro_batches < 100 else 0.01))
    assert predictor.lower_bound(dataclasses.replace(choice, schedule=AUTO)) <= seconds[AUTO] * (1 + 1e-9)


def test_a_list_holds_no_more_than_the_memory_that_is_predicted() -> None:
    predictor, choice = _predictor(2.0, 16, pipeline_max_in_flight=6)
    choice = dataclasses.replace(choice, schedule=AUTO)
    pipeline = predictor.pipeline(choice, wires_of(predictor.cluster, choice))
    assert isinstance(pipeline, ListPipeline)
    lists = [each for each in rank_schedules(pipeline, 16) if each.kind == AUTO]
    most_held = 0
    for candidate in lists:
        for ops in candidate.schedules(pipeline, 16):
            held, has_weights = 0, any(op.computation is Pass.WEIGHT for op in ops)
            for op in ops:
                held += op.is_forward - (op.computation is (Pass.WEIGHT if has_weights else Pass.BACKWARD))
                most_held = max(most_held, held)
    assert most_held == 6
    layer = predictor.book.piece(choice, predictor.order(choice, 1)[0])
    per_micro_batch = 2 * max(layer.saved_bytes, layer.recorded_bytes)  # two layers a stage
    assert predictor.predict(choice).memory["activations"] >= 6 * per_micro_batch


def test_runs_with_it_can_be_planned() -> None:
    config = small_run(8, parallel=STAGES | {"pipeline_schedule": AUTO})
    assert make_choice(resolve_for_planning(config, 8), 8).schedule == AUTO

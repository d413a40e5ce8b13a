"""Measured rows of the stages become the times of a pipeline."""

from __future__ import annotations

import pytest
import torch

from megatron.base.errors import UserError
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.parallel.pipeline.simulate import Hop
from megatron.training.schedule_choice import _divide_round_trips, list_times, make_pipeline
from tests.support.tiny import T5, merge, tiny_config

ROWS = [
    # forward, backward with weight, weight; encoding on and back, decoding on and back; transfer on and back; latency
    [0.3, 0.5, 0.0, 0.01, 0.0, 0.0, 0.02, 0.6, 0.0, 0.05],
    [0.2, 0.3, 0.1, 0.03, 0.04, 0.07, 0.08, 0.3, 0.2, 0.07],
    [0.4, 0.5, 0.2, 0.0, 0.06, 0.05, 0.0, 0.0, 0.1, 0.0],
]


def test_times_of_a_pipeline_from_the_rows_of_its_stages() -> None:
    pipeline = make_pipeline(ROWS, ScheduleLimits(5))
    assert (pipeline.stages, pipeline.chunks, pipeline.limits.in_flight) == (3, 1, 5)
    assert list(pipeline.forward_s) == [0.3, 0.2, 0.4]
    assert list(pipeline.weight_s) == [0.0, 0.1, 0.2]
    assert list(pipeline.backward_s) == [0.5, 0.3, 0.5]
    expected = {
        (True, 0): Hop(0.01, 0.6, 0.05, 0.07),
        (False, 0): Hop(0.04, 0.2, 0.05, 0.02),
        (True, 1): Hop(0.03, 0.3, 0.07, 0.05),
        (False, 1): Hop(0.06, 0.1, 0.07, 0.08),
    }
    assert {key: pipeline.hops(*key, False) for key in expected} == expected
    assert list_times(pipeline) == ROWS


def test_messages_share_the_time_there_and_back_by_their_bytes() -> None:
    """Of 0.8 s for 600 bytes on and 200 back, three quarters are on; over a boundary without messages there is none."""
    rows = torch.tensor([[*row[:7], 0.0, 0.0, row[9]] for row in [*ROWS, ROWS[2]]], dtype=torch.float64)
    rows[0, 7], rows[1, 8], rows[1, 7], rows[2, 8] = 600.0, 200.0, 300.0, 100.0
    _divide_round_trips(rows, torch.tensor([0.8, 0.4, 0.5], dtype=torch.float64))
    torch.testing.assert_close(rows[:, 7:9].tolist(), [[0.6, 0.0], [0.3, 0.2], [0.0, 0.1], [0.0, 0.0]])


def test_models_whose_sums_would_depend_on_the_schedule_are_refused() -> None:
    """The embedding of T5's decoder is also its output weight, whose gradients tensor parallelism records."""
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto"}
    tiny_config(merge(T5, {"parallel": parallel}), 2)
    with pytest.raises(UserError, match="--pipeline-schedule auto: in a t5 model"):
        tiny_config(merge(T5, {"parallel": {**parallel, "tensor_model_parallel_size": 2}}), 4)
    with pytest.raises(UserError, match="--pipeline-schedule auto: in a deberta model"):
        tiny_config({"model": {"model_type": "deberta"}, "parallel": parallel}, 2)


def test_deberta_has_no_v_form() -> None:
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}
    tiny_config({"parallel": parallel}, 2)
    with pytest.raises(UserError, match="--pipeline-schedule zb-v: each stage of DeBERTa holds one copy"):
        tiny_config({"model": {"model_type": "deberta"}, "parallel": parallel}, 2)

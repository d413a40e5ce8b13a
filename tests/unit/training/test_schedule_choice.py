"""Measured rows of the stages become the times of a pipeline."""

from __future__ import annotations

import pytest
import torch

from megatron.base.errors import UserError
from megatron.parallel.pipeline.simulate import Hop
from megatron.training.schedule_choice import _pipeline
from tests.support.tiny import T5, merge, tiny_config


def test_times_of_a_pipeline_from_the_rows_of_its_stages() -> None:
    rows = torch.tensor(
        [
            # forward, backward, weight; encoding on and back, decoding on and back; bytes on and back; latency,
            # there and back
            [0.3, 0.5, 0.0, 0.01, 0.0, 0.0, 0.02, 600.0, 0.0, 0.05, 0.8],
            [0.2, 0.2, 0.1, 0.03, 0.04, 0.07, 0.08, 300.0, 200.0, 0.07, 0.4],
            [0.4, 0.3, 0.2, 0.0, 0.06, 0.05, 0.0, 0.0, 100.0, 0.0, 0.0],
        ],
        dtype=torch.float64,
    )
    pipeline = _pipeline(rows)
    assert (pipeline.stages, pipeline.chunks) == (3, 1)
    assert list(pipeline.forward_s) == [0.3, 0.2, 0.4]
    assert list(pipeline.weight_s) == [0.0, 0.1, 0.2]
    torch.testing.assert_close(list(pipeline.backward_s), [0.5, 0.2 + 0.1, 0.3 + 0.2])
    expected = {
        # Of 0.8 s for 600 bytes on and 200 back, three quarters are on.
        (True, 0): Hop(0.01, 0.6, 0.05, 0.07),
        (False, 0): Hop(0.04, 0.2, 0.05, 0.02),
        (True, 1): Hop(0.03, 0.3, 0.07, 0.05),
        (False, 1): Hop(0.06, 0.1, 0.07, 0.08),
    }
    for (forward, boundary), hop in expected.items():
        measured = pipeline.hops(forward, boundary, False)
        torch.testing.assert_close(
            [measured.encode_s, measured.transfer_s, measured.latency_s, measured.decode_s],
            [hop.encode_s, hop.transfer_s, hop.latency_s, hop.decode_s],
        )


def test_models_whose_sums_would_depend_on_the_schedule_are_refused() -> None:
    """The embedding of T5's decoder is also its output weight, whose gradients tensor parallelism records."""
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto"}
    tiny_config(merge(T5, {"parallel": parallel}), 2)
    with pytest.raises(UserError, match="--pipeline-schedule auto: in a t5 model"):
        tiny_config(merge(T5, {"parallel": {**parallel, "tensor_model_parallel_size": 2}}), 4)
    with pytest.raises(UserError, match="--pipeline-schedule auto: in a deberta model"):
        tiny_config({"model": {"model_type": "deberta"}, "parallel": parallel}, 2)

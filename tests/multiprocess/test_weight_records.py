"""The memory of weight gradients that is announced before the first step: as much as the steps take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron.parallel.tensor.main_grad import WeightGrads
from megatron.training.weight_records import estimate_records
from tests.support.spawn import run_ranks
from tests.support.tiny import T5, merge, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess


class _MeasuredWeightGrads(WeightGrads):
    """Weight gradients that measure their records after each backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.most_passes = self.most_bytes = 0

    @contextmanager
    def recording(self, key: Any) -> Iterator[None]:
        with super().recording(key):
            yield
        num_bytes = sum(x.nbytes for key in self._records for x in self.tensors(key))
        self.most_passes, self.most_bytes = max(self.most_passes, len(self._records)), max(self.most_bytes, num_bytes)


def _measure(changes: dict[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Estimated and measured (passes, bytes) on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.training.assembly.WeightGrads", _MeasuredWeightGrads)
        engines = tiny_engines(changes)
    measured = engines.pipeline.weight_grads
    assert isinstance(measured, _MeasuredWeightGrads)
    estimated = estimate_records(engines)
    tiny_train(engines, 1)
    return estimated, (float(measured.most_passes), float(measured.most_bytes))


def _zero_bubble(pp: int, schedule: str = "zb-h1", tp: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"pipeline_model_parallel_size": pp, "tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    return {
        "parallel": {**sizes, "pipeline_schedule": schedule, **more},
        "training": {"micro_batch_size": 2, "global_batch_size": 16},
    }


MOE = {"model": {"num_experts": [4], "moe_router_topk": 2}}
SHRINKING_BATCH = {
    "train_iters": None, "train_samples": 64, "global_batch_size": None, "step_batch_size_schedule": "0:16 16:8",
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp4": (4, merge(_zero_bubble(4), {"model": {"num_layers": 4}})),
    "pp4, a record": (4, merge(_zero_bubble(4, pipeline_max_weight_records=1), {"model": {"num_layers": 4}})),
    "zb-v": (
        2,
        merge(_zero_bubble(2, "zb-v", virtual_pipeline_model_parallel_size=2), {"model": {"num_layers": 4}}),
    ),
    "tp2 pp2": (4, _zero_bubble(2, tp=2)),
    "t5": (2, merge(_zero_bubble(2), T5)),
    "t5, tp2": (4, merge(_zero_bubble(2, tp=2), T5)),
    "bert": (2, merge(_zero_bubble(2), {"model": {"model_type": "bert"}})),
    "largest batch": (4, merge(_zero_bubble(4), {"model": {"num_layers": 4}, "training": SHRINKING_BATCH})),
    "fp8 of experts": (2, merge(_zero_bubble(2), {"precision": {"bf16": True, "fp8": "tensorwise"}}, MOE)),
    "fp8, 12 tokens": (
        2,
        merge(_zero_bubble(2), {"precision": {"bf16": True, "fp8": "tensorwise"}, "model": {"seq_length": 6}}),
    ),
    "fp8": (2, merge(_zero_bubble(2), {"precision": {"bf16": True, "fp8": "tensorwise"}})),
}


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_steps_record(case: str) -> None:
    """Except for the scales of 8-bit numbers."""
    world_size, changes = CASES[case]
    for estimated, measured in run_ranks(world_size, _measure, changes):
        assert estimated == pytest.approx(measured, rel=5e-3)


WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"parallel": {"expert_model_parallel_size": 2}},
    "folded": _zero_bubble(2, tp=2, expert_tensor_parallel_size=1, expert_model_parallel_size=2),
    "tp2": _zero_bubble(2, tp=2),
    "capacity": {"model": {"moe_expert_capacity_factor": 0.5}},
}


@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_ranks_estimate_the_mean_of_their_records_with_experts(case: str) -> None:
    ranks = run_ranks(4, _measure, merge(_zero_bubble(2), MOE, WITH_EXPERTS[case]))
    estimated, measured = ([sum(column) for column in zip(*rows, strict=True)] for rows in zip(*ranks, strict=True))
    # Ranks have unequal loads, at different times.
    assert estimated == pytest.approx(measured, rel=0.05)

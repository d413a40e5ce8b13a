"""Trials of reductions, which a controller may ask for, and stages that a controller lets reduce exactly."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.compression.api import Controller, Reduced, Request, Trial
from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.distributed.clock import HostClock
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from megatron.training.assembly import Engines
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, tiny_engines, tiny_train

RANKS = (2, 8, 32)
TRIED = (None, *({"rank": rank} for rank in RANKS))


class _Tries(Controller):
    """Tries some reductions in the third step."""

    def __init__(self, tried: tuple[Mapping[str, float] | None, ...], repeats: int = 3) -> None:
        self.tried, self.repeats = tried, repeats
        self.found: list[list[float]] = []
        self.ahead: list[float] = []

    def needs_wait_times(self, iteration: int) -> bool:
        return iteration == 2

    def after_reduction(self, reduced: Reduced) -> Generator[Request | Trial, Tensor, None]:
        self.ahead.append(reduced.ahead_s)
        for options in self.tried if reduced.iteration == 2 else ():
            self.found.append((yield Trial(options, self.repeats)).tolist())

    def options(self, stage: int) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _changes(spec: str, **parallel: Any) -> dict[str, dict[str, Any]]:
    sections = {section: parallel.pop(section, {}) for section in ("precision", "model")}
    return {"parallel": parallel, "compression": {"compress": [spec]}, **sections}


def _bytes_clock(engines: Engines) -> HostClock:
    """A clock that advances a second for each byte that this rank sends of its gradients."""
    accounts = engines.ledger.accounts
    return HostClock(lambda: float(accounts[Point.DP_GRAD].wire_bytes + accounts[Point.EMBED_GRAD].wire_bytes))


def _tried(
    changes: dict[str, dict[str, Any]], point: Point = Point.DP_GRAD, tried: Any = TRIED, repeats: int = 3
) -> tuple[list[list[float]], Trace]:
    engines = tiny_engines(changes)
    controller = _Tries(tried, repeats)
    engines.sync.controllers.by_point[point] = controller
    engines.ledger.clock = _bytes_clock(engines)
    return controller.found, tiny_train(engines, 5)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "sharded, overlapped": (
        2,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 3000},
    ),
    "pp2 fp16": (
        4,
        {"pipeline_model_parallel_size": 2, "precision": {"fp16": True, "initial_loss_scale": 2.0**16}},
    ),
    "tp2 pp2 fp16": (
        8,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "precision": {"fp16": True, "initial_loss_scale": 2.0**16},
        },
    ),
    "experts on two replicas each, sharded": (
        4,
        {"expert_model_parallel_size": 2, "use_distributed_optimizer": True, "model": {"num_experts": [4]}},
    ),
    "experts on one replica each": (2, {"expert_model_parallel_size": 2, "model": {"num_experts": [4]}}),
    "virtual stages": (4, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
}


KEPT = ("dp2", "sharded, overlapped", "pp2 fp16", "experts on one replica each")


@pytest.mark.parametrize("name", mark_repeats(LAYOUTS, KEPT))
def test_a_trial_measures_time_and_error_and_changes_nothing(name: str) -> None:
    """The clock counts bytes: those of an exact reduction are the bucket's, and fewer with fewer columns."""
    world, layout = LAYOUTS[name]
    changes = _changes("dp-grad=powersgd,rank=32,min-ratio=0.1", **layout)
    without = run_ranks(world, _tried, changes, Point.DP_GRAD, ())
    with_trials = run_ranks(world, _tried, changes)
    for (_, dense), (measured, trace) in zip(without, with_trials, strict=True):
        assert trace.losses == dense.losses
        assert trace.grad_norms == dense.grad_norms
        seconds, errors, norms = (list(column) for column in zip(*measured, strict=True))
        shares = [math.sqrt(error / norm) for error, norm in zip(errors, norms, strict=True)]
        assert norms == pytest.approx([norms[0]] * len(norms))
        assert shares[0] < 1e-6
        assert shares[1] > 1.2 * shares[2] > 1e-3
        assert shares[3] < 1e-3, "the matrices are 32 wide"
        assert seconds[1] < seconds[2] < seconds[3]
        assert trace.bytes_by_point["dp-grad"] > dense.bytes_by_point["dp-grad"] + 3 * sum(seconds[:2])


def test_the_error_is_that_of_the_first_repeat() -> None:
    """The others begin with a residual, and go on from the last factors."""
    changes = _changes("dp-grad=powersgd,rank=32,min-ratio=0.1")
    once, repeated = (run_ranks(2, _tried, changes, Point.DP_GRAD, TRIED, repeats)[0][0] for repeats in (1, 4))
    assert repeated == once


def test_the_embedding_is_tried_as_well() -> None:
    changes = _changes("embedding=powersgd,rank=8,min-ratio=0.1", pipeline_model_parallel_size=2)
    for measured, _ in run_ranks(4, _tried, changes, Point.EMBED_GRAD):
        seconds, errors, norms = zip(*measured, strict=True)
        assert seconds[0] > seconds[2] > seconds[1] > 0
        assert errors[0] < 1e-12 * norms[0]
        assert errors[1] > 1e-3 * norms[1]
        assert errors[2] < 1e-6 * norms[2], "the sum has been made of as many columns"


def _waits() -> list[float]:
    engines = tiny_engines(_changes("dp-grad=powersgd,rank=2", pipeline_model_parallel_size=2))
    controller = _Tries(())
    engines.sync.controllers.by_point[Point.DP_GRAD] = controller
    # A second for each byte of the ranks' meeting, on the last stage.
    account, factor = engines.ledger.accounts[Point.CONTROL], engines.plan.stage
    engines.ledger.clock = HostClock(lambda: float(factor * account.wire_bytes))
    tiny_train(engines, 5)
    return controller.ahead


def test_a_controller_learns_how_long_a_rank_waits_for_the_others() -> None:
    waits = run_ranks(4, _waits)
    assert sorted(ahead[2] for ahead in waits) == [0.0, 0.0, 6.0, 6.0]
    assert all(ahead[:2] == ahead[3:] == [0.0, 0.0] for ahead in waits)


def _reduce_twice(spec: str, later_spec: str) -> tuple[Tensor, Tensor, bool]:
    """The sums of two reductions, the exact sums, and whether a residual is left."""
    group = Group(dist.group.WORLD, tuple(range(dist.get_world_size())), dist.get_rank(), "dp", "gloo")
    plan = CompressionPlan(read_specs([spec], build_registry([]), RunLength(10)))
    places = (ParamRange("a", 0, (12, 8)), ParamRange("b", 96, (12, 8)), ParamRange("c", 192, (5,)))
    flat = torch.empty(197)
    reducer = GradReducer([GradBucket(flat, places)], group, plan, Ledger(), False)
    summed, expected = torch.zeros(197), torch.zeros(197)
    for iteration in range(2):
        all_ranks = [torch.randn(197, generator=torch.Generator().manual_seed(7 * iteration + r)) for r in range(2)]
        expected += torch.stack(all_ranks).sum(dim=0)
        flat.copy_(all_ranks[group.rank])
        plan.begin_step(iteration)
        if iteration == 1 and later_spec == "exact":
            plan.tune(Point.DP_GRAD, None)
        reducer.begin_step(iteration, 1.0)
        reducer.finish_reduction()
        summed += flat
        for units in reducer.units:
            for unit in units:
                unit.state.commit()
    return summed, expected, any(list(unit.state.tensors) != ["q"] for units in reducer.units for unit in units)


@pytest.mark.parametrize(
    ("spec", "later_spec"),
    [
        ("dp-grad=powersgd,rank=2", "exact"),
        ("dp-grad=powersgd,rank=2,error-feedback=aggregate", "exact"),
        ("dp-grad=powersgd,rank=2@0/8@1", "does not pay"),
    ],
)
def test_a_residual_goes_along_with_the_first_exact_reduction(spec: str, later_spec: str) -> None:
    for summed, expected, residual in run_ranks(2, _reduce_twice, spec, later_spec):
        assert torch.allclose(summed, expected, atol=1e-5)
        assert not residual

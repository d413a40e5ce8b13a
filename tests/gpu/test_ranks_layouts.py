"""Layouts over NCCL, all ranks on one GPU: they start from cold processes, and give the numbers of a single process."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch._dynamo.utils import counters

from megatron.training.step import evaluation_step, take_batches, train_step
from tests.multiprocess import test_layouts as layouts
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_batches, tiny_engines, tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

Changes = dict[str, dict[str, Any]]

WARM_UP = 2
"""Iterations before the codecs; after as many, the first evaluation comes."""
CODECS = [
    f"pp-forward=fixpoint,bits=8,warmup={WARM_UP}",
    f"pp-backward=lowrank,rank=2,warmup={WARM_UP},error-feedback=lazy",
]
STEPS = 6

COLD: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {}),
    "pp2 interleaved": (2, {"num_layers_per_virtual_pipeline_stage": 1}),
    "pp2 eager": (2, {"pipeline_schedule": "eager-1f1b"}),
    "pp2 gpipe": (2, {"pipeline_schedule": "gpipe"}),
    "pp2 zb-h1": (2, {"pipeline_schedule": "zb-h1"}),
    "pp2 zb-v": (2, {"pipeline_schedule": "zb-v"}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp4 eager": (4, {"pipeline_model_parallel_size": 4, "pipeline_schedule": "eager-1f1b"}),
    "pp4 zb-h1": (4, {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1"}),
    "tp2 pp2 dp2": (8, {"tensor_model_parallel_size": 2}),
}
EXACT = ("pp2 interleaved", "pp4 eager")
"""Those that run without codecs, too: the others take the same paths."""
STEPS_IN_DOUBLE = 20


def _changes(parallel: dict[str, Any], codecs: bool, compiled: bool = False) -> Changes:
    changes: Changes = {
        "parallel": {"pipeline_model_parallel_size": 2, **parallel},
        "precision": {"fp64": True},
        "training": {"global_batch_size": 8, "compile": "on" if compiled else "off"},
    }
    if codecs:
        changes["compression"] = {"compress": CODECS}
    return changes


def _cold(changes: Changes) -> list[float]:
    """Losses of the training steps; an evaluation comes between."""
    engines = tiny_engines(changes)
    config, layout = engines.config, engines.topology.layout
    batches = tiny_batches(config, engines.topology, masked=False)
    held_out = tiny_batches(config, engines.topology, masked=False, start=1000)
    count = config.training.global_batch_size // (config.training.micro_batch_size * layout.dp)
    losses = []
    for iteration in range(STEPS):
        step_batches = take_batches(batches, count, engines.topology.device)
        losses.append(
            train_step(engines, step_batches, iteration, config.optimizer.lr, config.optimizer.weight_decay).loss
        )
        if iteration + 1 == WARM_UP:
            evaluation_step(engines, take_batches(held_out, 2, engines.topology.device))
    assert bool(counters["inductor"]) == (config.training.compile == "on")
    return losses


def _check_cold(name: str, codecs: bool, compiled: bool = False) -> None:
    ranks, parallel = COLD[name]
    expected = tiny_run({**_changes({}, codecs=False), "parallel": {}}, STEPS).losses
    same = WARM_UP if codecs else STEPS
    for losses in run_ranks(ranks, _cold, _changes(parallel, codecs, compiled), timeout=200.0):
        assert losses[:same] == pytest.approx(expected[:same], rel=1e-10, abs=0)
        assert all(math.isfinite(loss) for loss in losses)
        assert losses == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", COLD)
def test_pipelines_run_from_cold_processes(name: str) -> None:
    """Every kernel is loaded for the first time by some step of this run; codecs begin after the warm-up."""
    _check_cold(name, codecs=True)


@pytest.mark.parametrize("name", EXACT)
def test_pipelines_without_codecs_run_from_cold_processes(name: str) -> None:
    """Their steps are of the same kind from the first to the last, and exact to the last."""
    _check_cold(name, codecs=False)


def test_compiled_layers_run_from_cold_processes() -> None:
    """Compiled kernels are loaded at their first launch, too."""
    _check_cold("pp2", codecs=True, compiled=True)


@pytest.mark.timeout(700)  # the ranks may take half of that
@pytest.mark.parametrize("world_size", [2, 4])
def test_double_precision_agrees(world_size: int) -> None:
    """The layouts that combine the most."""
    layouts.check_long_layouts(world_size, STEPS_IN_DOUBLE)

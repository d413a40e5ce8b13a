"""Compiled layers: one graph for all of them, made once, and the losses of layers that are not compiled."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.steps import StepSizes
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step
from tests.support.tiny import T5, tiny_batches, tiny_engines, tiny_train

pytestmark = pytest.mark.slow

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "num_query_groups": 2}
WINDOW = {"sliding_window": 5, "parallel_residual": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "window": WINDOW,
    "gpt dropout": DROPOUT,
    "llama dropout": {**LLAMA, **DROPOUT},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "kept": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def _losses(engines: Engines) -> tuple[list[float], list[float]]:
    """Of a first step, and of three more."""
    return tiny_train(engines, 1).losses, tiny_train(engines, 3).losses


def _graphs() -> tuple[int, int]:
    """Graphs that were captured, and places where one broke off."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", MODELS)
def test_one_graph_serves_all_layers_and_steps(model: str, recompute: str) -> None:
    changes: dict[str, dict[str, Any]] = {"model": MODELS[model], "recompute": RECOMPUTE[recompute]}
    wanted = _losses(tiny_engines(changes))
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager")
    first = tiny_train(engines, 1).losses
    made = _graphs()
    assert made == (1, 0)
    assert first == pytest.approx(wanted[0], rel=1e-6)
    assert tiny_train(engines, 3).losses == pytest.approx(wanted[1], rel=1e-6)
    assert _graphs() == made
    for _ in range(2):
        evaluation_step(engines, list(islice(tiny_batches(engines.config, engines.topology, False), 2)))
        tiny_train(engines, 1)
        assert _graphs() == (2, 0)


def test_an_encoder_and_its_decoder_have_a_graph_each() -> None:
    changes = {**T5, "model": {**T5["model"], **DROPOUT, "num_layers": 2, "decoder_num_layers": 3}}
    wanted = _losses(tiny_engines(changes))
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager")
    found = _losses(engines)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found[1] == pytest.approx(wanted[1], rel=1e-6)
    assert _graphs() == (2, 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_8_bit_products_are_in_the_same_graph(recipe: str) -> None:
    changes: dict[str, dict[str, Any]] = {"precision": {"bf16": True, "fp8": recipe}, "model": LLAMA}
    wanted = _losses(tiny_engines(changes))
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager")
    assert _losses(engines) == wanted
    assert _graphs() == (1, 0)


def test_compiled_code_gives_the_losses_of_eager_layers() -> None:
    """By torch's own generator of code, as --compile on asks for it."""
    changes: dict[str, dict[str, Any]] = {"model": {**LLAMA, **DROPOUT, "num_layers": 2}}
    wanted = tiny_train(tiny_engines(changes), 2).losses
    found = tiny_train(tiny_engines({**changes, "training": {"compile": "on"}}), 2).losses
    assert _graphs() == (1, 0)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert counters["inductor"]


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_sequences_that_grow_need_two_graphs(model: str) -> None:
    """One of the first length and one of any; without the second, torch gives up after its limit of graphs."""
    lengths = LengthSchedule((4, 6, 8, 10, 11, 12, 13, 14, 15, 16), tuple(range(10)))
    sizes = StepSizes(BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), lengths)
    changes: dict[str, dict[str, Any]] = {"model": MODELS[model]}
    wanted = tiny_train(tiny_engines(changes), 10, sizes=sizes).losses
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager", lengths_vary=True)
    found = tiny_train(engines, 10, sizes=sizes).losses
    assert found == pytest.approx(wanted, rel=1e-6)
    assert _graphs() == (2, 0)

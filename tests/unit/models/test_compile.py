"""Compiled layers: a single graph for all layers, and the losses of eager layers."""

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
from tests.support.combinations import in_turn, mark_repeats
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
    """Losses of a first step, and of three more."""
    return tiny_train(engines, 1).losses, tiny_train(engines, 3).losses


def _graphs() -> tuple[int, int]:
    """Numbers of captured graphs and of graph breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("model", "recompute"),
    # Without dropout and recomputation, the tests below compile both models.
    mark_repeats(
        in_turn([("gpt",), ("llama dropout",), ("gpt dropout",), ("llama",), ("window",)], list(RECOMPUTE)),
        keep=[("llama dropout", "selective"), ("gpt dropout", "full"), ("window", "selective")],
    ),
)
def test_all_layers_and_steps_share_a_graph(model: str, recompute: str) -> None:
    changes: dict[str, dict[str, Any]] = {"model": MODELS[model], "recompute": RECOMPUTE[recompute]}
    eager_losses = _losses(tiny_engines(changes))
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager")
    for losses in eager_losses:
        assert tiny_train(engines, len(losses)).losses == pytest.approx(losses, rel=1e-6)
        assert _graphs() == (1, 0)
    for _ in range(2):
        evaluation_step(engines, list(islice(tiny_batches(engines.config, engines.topology, False), 2)))
        tiny_train(engines, 1)
        assert _graphs() == (2, 0)


def test_the_encoder_and_the_decoder_have_a_graph_each() -> None:
    changes = {**T5, "model": {**T5["model"], **DROPOUT, "num_layers": 2, "decoder_num_layers": 3}}
    eager_losses = tiny_train(tiny_engines(changes), 4).losses
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager")
    assert tiny_train(engines, 4).losses == pytest.approx(eager_losses, rel=1e-6)
    assert _graphs() == (2, 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_8_bit_products_share_the_graph(recipe: str) -> None:
    changes: dict[str, dict[str, Any]] = {"precision": {"bf16": True, "fp8": recipe}, "model": LLAMA}
    eager_losses = _losses(tiny_engines(changes))
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager")
    assert _losses(engines) == eager_losses
    assert _graphs() == (1, 0)


def test_compile_on_generates_code_with_the_losses_of_eager_layers() -> None:
    changes: dict[str, dict[str, Any]] = {"model": {**LLAMA, **DROPOUT, "num_layers": 2}}
    eager_losses = tiny_train(tiny_engines(changes), 2).losses
    losses = tiny_train(tiny_engines({**changes, "training": {"compile": "on"}}), 2).losses
    assert _graphs() == (1, 0)
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert counters["inductor"]


@pytest.mark.parametrize("model", mark_repeats(["gpt", "llama"], keep=["llama"]))
def test_growing_sequences_need_two_graphs(model: str) -> None:
    """For the first length and for any length; without the second, torch reaches its limit of graphs."""
    lengths = LengthSchedule((4, 6, 8, 10, 11, 12, 13, 14, 15, 16), tuple(range(10)))
    sizes = StepSizes(BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), lengths)
    changes: dict[str, dict[str, Any]] = {"model": MODELS[model]}
    eager_losses = tiny_train(tiny_engines(changes), 10, sizes=sizes).losses
    engines = tiny_engines(changes)
    engines.stages[0].compile_layers(backend="aot_eager", lengths_vary=True)
    assert tiny_train(engines, 10, sizes=sizes).losses == pytest.approx(eager_losses, rel=1e-6)
    assert _graphs() == (2, 0)

"""Each variant of the model changes what is computed, and attention sees what it should on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.block import TransformerLayer
from megatron.model.context import ForwardContext
from megatron.model.stage import Stage
from megatron.parallel.tensor.random import DropoutKeys
from tests.support.tiny import VOCAB, tiny_engines, tiny_run

ROPE = {"position_embedding_type": "rope"}
YARN = {"rotary_scaling": "yarn", "rotary_base": 50.0, "rotary_scaling_original_length": 24}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (ROPE, {"rotary_scaling": "linear"}),
    "llama3": (ROPE, {"rotary_scaling": "llama3", "rotary_scaling_original_length": 64}),
    "llama3, another factor": (
        {**ROPE, "rotary_scaling": "llama3", "rotary_scaling_original_length": 64},
        {"rotary_scaling_factor": 2.0},
    ),
    "yarn": (ROPE, YARN),
    "yarn, another factor": ({**ROPE, **YARN}, {"rotary_scaling_factor": 2.0}),
    "yarn, another factor of attention": ({**ROPE, **YARN}, {"rotary_scaling_attention_factor": 1.5}),
    "yarn, not rounded": ({**ROPE, **YARN}, {"yarn_correction_range_round_to_int": False}),
    "parallel": ({}, {"parallel_residual": True}),
    "window": ({}, {"sliding_window": 4}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_another_model(name: str) -> None:
    base, change = VARIANTS[name]
    first, second = tiny_run({"model": base}, 2), tiny_run({"model": {**base, **change}}, 2)
    assert first.losses[0] != pytest.approx(second.losses[0], rel=1e-9)


def _seen(stage: Stage, context: ForwardContext | None = None, layer: int = 0) -> torch.Tensor:
    """Which positions of a text (rows) a later one (columns) depends on, in the attention of one layer."""
    tokens = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    embedded = stage.embedding(tokens, ForwardContext()).detach().requires_grad_()
    attending = stage.layers[str(layer)]
    assert isinstance(attending, TransformerLayer)
    context = context or ForwardContext()
    keys = attending.dropout_keys(context)
    out_sbh, _ = attending.self_attention(embedded, context, None, keys and keys.attention)
    rows = []
    for position in range(16):
        (gradient,) = torch.autograd.grad(out_sbh[position].sum(), embedded, retain_graph=True)
        rows.append(gradient.abs().sum((1, 2)) > 0)
    return torch.stack(rows)


@pytest.mark.parametrize("window", [1, 5, 15, 16, 40])
@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["sdpa", "written out"])
def test_a_position_sees_its_window(window: int, dropout: float) -> None:
    engines = tiny_engines({"model": {"sliding_window": window, "attention_dropout": dropout}})
    keys = DropoutKeys(1, (0,)) if dropout else None
    seen = _seen(engines.stages[0], ForwardContext(dropout=keys))
    distance = torch.arange(16).unsqueeze(1) - torch.arange(16)
    assert torch.equal(seen, (distance >= 0) & (distance < window))


def test_layers_differ_in_their_windows() -> None:
    """As Megatron counts: of every N layers the last one attends to all."""
    model = {"num_layers": 6, "sliding_window": 5, "window_attn_skip_freq": [3]}
    config = tiny_engines({"model": model}).config.model
    assert [config.window_of(layer) for layer in range(6)] == [5, 5, None, 5, 5, None]
    assert config.window_attn_skip_freq == [1, 1, 0, 1, 1, 0]
    stage = tiny_engines({"model": {"num_layers": 2, "sliding_window": 5, "window_attn_skip_freq": [0, 1]}}).stages[0]
    distance = torch.arange(16).unsqueeze(1) - torch.arange(16)
    assert torch.equal(_seen(stage), distance >= 0)
    assert torch.equal(_seen(stage, layer=1), (distance >= 0) & (distance < 5))


def test_a_window_ends_at_the_document() -> None:
    stage = tiny_engines({"model": {"sliding_window": 5}}).stages[0]
    segments = torch.tensor([[0] * 7 + [1] * 9])
    seen = _seen(stage, ForwardContext(segment_ids_bs=segments))
    distance = torch.arange(16).unsqueeze(1) - torch.arange(16)
    same = segments[0].unsqueeze(1) == segments[0]
    assert torch.equal(seen, (distance >= 0) & (distance < 5) & same)

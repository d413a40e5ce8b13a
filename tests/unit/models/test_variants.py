"""Each variant of the model changes its losses, and attention is masked correctly on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.models.block import TransformerLayer
from megatron.models.context import ForwardContext
from megatron.models.stage import Stage
from megatron.parallel.tensor.random import DropoutKeys
from tests.support.tiny import VOCAB, tiny_engines, tiny_run

DISTANCE = torch.arange(16).unsqueeze(1) - torch.arange(16)
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
    "another base of layers with a window": ({**ROPE, "sliding_window": 4}, {"rope_local_base_freq": 50.0}),
    "geglu": ({"swiglu": True}, {"swiglu": False, "geglu": True}),
    "norms of weights beside 1": ({}, {"apply_layernorm_1p": True, "normalization": "RMSNorm"}),
    "four norms": ({}, {"sandwich_norm": True}),
    "scaled embeddings": ({}, {"apply_embedding_scaling": True}),
    "scores divided by another number": ({}, {"query_pre_attn_scalar": 3}),
    "bounded scores": ({}, {"attn_logit_softcapping": 0.1}),
    "bounded logits": ({}, {"final_logit_softcapping": 0.5}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_changes_the_loss(name: str) -> None:
    base, change = VARIANTS[name]
    first, second = tiny_run({"model": base}, 2), tiny_run({"model": {**base, **change}}, 2)
    assert first.losses[0] != pytest.approx(second.losses[0], rel=1e-9)


def _dependencies(stage: Stage, context: ForwardContext | None = None, layer: int = 0) -> torch.Tensor:
    """Whether a position (row) depends on another (column), in the attention of a single layer."""
    tokens = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    embedded = stage.embedding(tokens, ForwardContext()).detach().requires_grad_()
    block = stage.layers[str(layer)]
    assert isinstance(block, TransformerLayer)
    context = context or ForwardContext()
    keys = block.dropout_keys(context)
    out_sbh, _ = block.self_attention(embedded, context, None, keys and keys.attention)
    rows = []
    for position in range(16):
        (gradient,) = torch.autograd.grad(out_sbh[position].sum(), embedded, retain_graph=True)
        rows.append(gradient.abs().sum((1, 2)) > 0)
    return torch.stack(rows)


@pytest.mark.parametrize("window", [1, 5, 15, 16, 40])
@pytest.mark.parametrize(("dropout", "cap"), [(0.0, None), (1e-12, None), (0.0, 3.0)], ids=["sdpa", "dropout", "cap"])
def test_a_position_attends_to_its_window(window: int, dropout: float, cap: float | None) -> None:
    model = {"sliding_window": window, "attention_dropout": dropout, "attn_logit_softcapping": cap}
    engines = tiny_engines({"model": model})
    keys = DropoutKeys(1, (0,)) if dropout else None
    dependencies = _dependencies(engines.stages[0], ForwardContext(dropout=keys))
    assert torch.equal(dependencies, (DISTANCE >= 0) & (window > DISTANCE))


def test_layers_differ_in_their_windows() -> None:
    """The last of every N layers has full attention, as in Megatron."""
    model = {"num_layers": 6, "sliding_window": 5, "window_attn_skip_freq": [3]}
    config = tiny_engines({"model": model}).config.model
    assert [config.window_of(layer) for layer in range(6)] == [5, 5, None, 5, 5, None]
    assert config.window_attn_skip_freq == [1, 1, 0, 1, 1, 0]
    stage = tiny_engines({"model": {"num_layers": 2, "sliding_window": 5, "window_attn_skip_freq": [0, 1]}}).stages[0]
    assert torch.equal(_dependencies(stage), DISTANCE >= 0)
    assert torch.equal(_dependencies(stage, layer=1), (DISTANCE >= 0) & (DISTANCE < 5))


def test_a_window_ends_at_its_document() -> None:
    stage = tiny_engines({"model": {"sliding_window": 5}}).stages[0]
    segments = torch.tensor([[0] * 7 + [1] * 9])
    dependencies = _dependencies(stage, ForwardContext(segment_ids_bs=segments))
    same = segments[0].unsqueeze(1) == segments[0]
    assert torch.equal(dependencies, (DISTANCE >= 0) & (DISTANCE < 5) & same)


def test_norms_with_weights_around_0_add_1_in_32_bits() -> None:
    """In 16 bits 1 + 1/512 would be 1."""
    trained: dict[str, Any] = {"model": {"normalization": "RMSNorm"}, "precision": {"bf16": True}}
    plain, moved = (
        tiny_engines({**trained, "model": {**trained["model"], "apply_layernorm_1p": on}}).stages[0].final_layernorm
        for on in (False, True)
    )
    x_sbh = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert not moved.weight.any()
    assert torch.equal(moved(x_sbh), plain(x_sbh))
    with torch.no_grad():
        moved.weight.fill_(1 / 512)
    expected = torch.nn.functional.rms_norm(x_sbh.float(), (32,), eps=1e-5) * (1 + 1 / 512)
    assert torch.equal(moved(x_sbh), expected.bfloat16())
    assert not torch.equal(moved(x_sbh), plain(x_sbh))


def test_the_scale_of_embeddings_is_in_their_precision() -> None:
    """The square root of 32 is 5.65685, in 16 bits 5.65625."""
    cases: list[tuple[dict[str, Any], float]] = [({}, 32**0.5), ({"bf16": True}, 5.65625), ({"fp64": True}, 32**0.5)]
    for precision, scale in cases:
        model = {"apply_embedding_scaling": True, "position_embedding_type": "none"}
        embedding = tiny_engines({"model": model, "precision": precision}).stages[0].embedding
        tokens = torch.arange(4).unsqueeze(0)
        rows = embedding.word_embeddings.weight[:4]
        actual, expected = embedding(tokens, ForwardContext())[:, 0], (rows.double() * scale).to(rows.dtype)
        assert torch.equal(actual, expected) if precision else torch.allclose(actual, expected, rtol=3e-7, atol=0)

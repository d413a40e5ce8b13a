"""Matrices that Muon orthogonalizes, by parameter: the table of docs/guides/muon.md."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.tiny import T5, tiny_engines

BERT: dict[str, dict[str, Any]] = {"tokenizer": {"tokenizer_type": "BertWordPieceCase", "vocab_file": "unused"}}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {
        "model": {
            "swiglu": True, "num_query_groups": 2, "ffn_hidden_size": 24, "num_experts": [4], "expert_interval": 2,
            "num_layers": 2, "moe_shared_expert_intermediate_size": 10, "moe_shared_expert_gate": True,
            "untie_embeddings_and_output_weights": True,
        }
    },
    "t5": {**T5, "model": {**T5["model"], "num_layers": 1, "decoder_num_layers": 1}},
    "bert": {**BERT, "model": {"model_type": "bert", "num_layers": 1}},
    "deberta": {
        **BERT,
        "model": {
            "model_type": "deberta", "task_head": "classification", "task_classes": 2, "num_layers": 1,
            "position_buckets": 6, "conv_kernel_size": 3,
        },
    },
}  # fmt: skip
EXPERT = {"dense_h_to_4h": [24, 24], "dense_4h_to_h": [16]}
"""SwiGLU's gate and value, and the output projection."""
SELF = {"self_attention.query_key_value": [16, 16, 16], "self_attention.dense": [16]}
PLAIN = {**SELF, "mlp.dense_h_to_4h": [64], "mlp.dense_4h_to_h": [16]}
GROUPED = {**SELF, "self_attention.query_key_value": [16, 8, 8]}
CROSS = {"cross_attention.query": [16], "cross_attention.key_value": [16, 16], "cross_attention.dense": [16]}
MATRICES: dict[str, dict[int, dict[str, list[int]]]] = {
    "gpt": {
        0: {**GROUPED, **{f"mlp.{name}": rows for name, rows in EXPERT.items()}},
        1: {
            **GROUPED,
            **{f"mlp.experts.{number}.{name}": rows for number in range(4) for name, rows in EXPERT.items()},
            "mlp.shared.dense_h_to_4h": [10, 10],
            "mlp.shared.dense_4h_to_h": [16],
            "mlp.router": [4],
        },
    },
    "t5": {0: PLAIN, 1: {**PLAIN, **CROSS}},
    "bert": {0: PLAIN},
    "deberta": {0: PLAIN},
}


@pytest.mark.parametrize("kind", MODELS)
def test_matrices_match_the_table(kind: str) -> None:
    """Embeddings, heads, the convolution and a shared expert's gate have none."""
    changes = {**MODELS[kind], "model": {"hidden_size": 16, "num_attention_heads": 4, **MODELS[kind]["model"]}}
    matrix_rows = {}
    for buffer in tiny_engines(changes).buffers:
        for slot in (slot for bucket in buffer.buckets for slot in bucket.slots if slot.spec.blocks):
            blocks = slot.spec.blocks
            repeated = math.prod(slot.spec.logical_shape[:-1]) // sum(blocks)
            matrix_rows[slot.logical_name] = [repeated * rows for rows in blocks]
    layers = MATRICES[kind]
    assert matrix_rows == {
        f"layers.{number}.{name}.weight": rows for number, matrices in layers.items() for name, rows in matrices.items()
    }

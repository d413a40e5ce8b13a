"""``--fp64`` computes everything in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.roundings import Roundings, roundings
from tests.support.tiny import T5

EXPERTS = {
    "num_experts": [4],
    "moe_aux_loss_coeff": [0.05, 0.01, 0.03],
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_z_loss_coeff": 1e-3,
    "moe_input_jitter_eps": 0.05,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {"training": {"micro_batch_size": 3, "global_batch_size": 9}},
    "llama-like": {
        "model": {
            "position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_scaling": "llama3",
            "rotary_scaling_factor": 4.0, "rotary_scaling_original_length": 8, "normalization": "RMSNorm",
            "swiglu": True, "num_query_groups": 2, "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True, "sliding_window": 5, "qk_layernorm": True,
        },
        "optimizer": {"optimizer": "muon"},
    },
    "gemma-like": {
        "model": {
            "position_embedding_type": "rope", "rope_local_base_freq": 50.0, "sliding_window": 5,
            "window_attn_skip_freq": [2], "normalization": "RMSNorm", "apply_layernorm_1p": True, "sandwich_norm": True,
            "apply_embedding_scaling": True, "geglu": True, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    },
    "experts": {"model": EXPERTS},
    "experts with biases": {
        "model": {
            "num_experts": [4], "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.01, "moe_expert_capacity_factor": 0.75,
        },
        "optimizer": {"optimizer": "lamb"},
    },
    "bert": {"model": {"model_type": "bert"}, "recompute": {"recompute_granularity": "selective"}},
    "t5": {**T5, "optimizer": {"optimizer": "sgd"}},
    "deberta": {
        "model": {
            "model_type": "deberta", "task_head": "classification", "task_classes": 2, "position_buckets": 6,
            "conv_kernel_size": 3,
        },
        "recompute": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_no_step_leaves_float64(model: str) -> None:
    assert roundings(MODELS[model]) == set()


def test_the_recorder_notes_each_loss_of_precision() -> None:
    """Python numbers, casts forward and backward, and writes in place; neither whole numbers nor views."""
    x = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    mask, space = torch.ones(2), torch.empty(2)
    writes = [
        lambda: torch.tensor(0.1),
        lambda: x.float(),
        lambda: space.copy_(x),
        lambda: mask / 3,
        lambda: (x * x.detach().float().double()).sum(),
    ]
    harmless = [lambda: mask.sum() - torch.inf, lambda: x / mask.sum(), lambda: space.view(2, 1), lambda: mask.double()]
    for operations, count in ((writes, 1), (harmless, 0)):
        for operation in operations:
            with Roundings() as record, torch.no_grad():
                operation()
            assert len(record.places) == count
    for total, count in ((x.float().sum(), 0), ((x.float() / 3).sum(), 1)):
        with Roundings() as record:
            total.backward()
        assert len(record.places) == count

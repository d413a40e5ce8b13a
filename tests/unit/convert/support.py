"""Small random models as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.model_state import model_tensors
from megatron.checkpoint.save import save_checkpoint
from megatron.convert.command import main
from tests.support.tiny import VOCAB, tiny_engines

LENGTH, HIDDEN, HEADS = 16, 32, 4
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 untied, exact gelu": {"untie_embeddings_and_output_weights": True, "bias_gelu_fusion": False},
    "llama, 1 group": {**LLAMA, "num_query_groups": 1},
    "llama, 2 groups, untied": {**LLAMA, "num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    "llama, wide heads": {**LLAMA, "kv_channels": 16, "rotary_base": 5000.0},
    "llama with biases": {**LLAMA, "add_bias_linear": True, "num_query_groups": 2},
    "llama, all wavelengths scaled": {**LLAMA, "rotary_scaling": "linear", "rotary_scaling_factor": 3.0},
    "llama 3": {**LLAMA, "rotary_scaling": "llama3", "rotary_scaling_factor": 32.0, "rotary_base": 5e4},
    "qwen2, 2 groups, untied": {
        **LLAMA,
        "add_qkv_bias": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "neox": {"position_embedding_type": "rope"},
    "neox, half rotated, exact gelu, untied": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": True,
    },
}
GEMMA = {
    **{name: value for name, value in LLAMA.items() if name != "swiglu"},
    "geglu": True,
    "apply_layernorm_1p": True,
    "sandwich_norm": True,
    "apply_embedding_scaling": True,
    "sliding_window": 5,
}
YARN = {"rotary_scaling": "yarn", "rotary_base": 50.0, "rotary_scaling_original_length": 24}
NOT_CLASSIC: dict[str, dict[str, Any]] = {
    "llama, yarn": {**LLAMA, **YARN, "rotary_scaling_high_turns": 3.0},
    "qwen2, yarn with fractions": {
        **LLAMA,
        **YARN,
        "kv_channels": 24,
        "rotary_base": 900.0,
        "rotary_scaling_factor": 3.5,
        "rotary_scaling_low_turns": 0.4,
        "rotary_scaling_attention_factor": 1.25,
        "yarn_correction_range_round_to_int": False,
        "add_qkv_bias": True,
    },
    "llama 3, short": {
        **LLAMA,
        "rotary_base": 20.0,
        "rotary_scaling": "llama3",
        "rotary_scaling_original_length": 24,
        "rotary_scaling_high_turns": 3.0,
    },
    "mistral": {**LLAMA, "num_query_groups": 2, "sliding_window": 5},
    "qwen2 with a window": {
        **LLAMA,
        "add_qkv_bias": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 2.5,
        "sliding_window": 3,
    },
    "qwen3, 2 groups, with a window": {
        **LLAMA,
        "qk_layernorm": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "sliding_window": 3,
    },
    "qwen2, windows in some layers": {**LLAMA, "add_qkv_bias": True, "sliding_window": 3, "window_attn_skip_freq": [2]},
    "qwen3, windows in some layers": {**LLAMA, "qk_layernorm": True, "sliding_window": 4, "window_attn_skip_freq": [3]},
    "qwen3, tied": {**LLAMA, "qk_layernorm": True},
    "ministral": {**LLAMA, "num_query_groups": 2, "sliding_window": 5, "window_attn_skip_freq": [3]},
    "gemma2": {
        **GEMMA,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "window_attn_skip_freq": [2],
    },
    "gemma2 without bounds, all layers with a window, untied": {
        **GEMMA,
        "kv_channels": 12,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 2.5,
        "untie_embeddings_and_output_weights": True,
    },
    "gemma3": {
        **GEMMA,
        "qk_layernorm": True,
        "query_pre_attn_scalar": 20,
        "rotary_base": 60.0,
        "rope_local_base_freq": 15.0,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 3.0,
        "window_attn_skip_freq": [2],
    },
    "gemma3, bounded logits, one base, last layer with a window": {
        **GEMMA,
        "qk_layernorm": True,
        "kv_channels": 12,
        "final_logit_softcapping": 1.5,
        "window_attn_skip_freq": [0, 0, 1],
        "num_query_groups": 2,
    },
    "gemma3 without windows, scaled": {
        **GEMMA,
        **YARN,
        "qk_layernorm": True,
        "sliding_window": None,
    },
    "neox, side by side": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.25,
        "parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
}
"""Models that the classic layout has no words for."""

EXPERTS = {**LLAMA, "num_experts": [4], "moe_router_topk": 2, "num_query_groups": 2}
SHARED = {
    **EXPERTS,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_ffn_hidden_size": 24,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "moe_aux_loss_coeff": [0.02], "sliding_window": 5, "moe_input_jitter_eps": 0.01},
    "mixtral, 3 of 5 experts, untied": {
        **EXPERTS,
        "moe_expert_capacity_factor": 1.0,
        "moe_eval_capacity_factor": 1.75,  # of at least 5 / 3: no token is dropped
        "num_experts": [5],
        "moe_router_topk": 3,
        "untie_embeddings_and_output_weights": True,
        "moe_router_load_balancing_type": ["none"],
        "moe_aux_loss_coeff": [0.0],
    },
    "qwen2-moe": {**SHARED, "add_qkv_bias": True, "moe_router_pre_softmax": True},
    "qwen2-moe, top 1, every other layer, with a window": {
        **SHARED,
        "add_qkv_bias": True,
        "moe_router_topk": 1,
        "expert_interval": 2,
        "sliding_window": 3,
    },
    "qwen3-moe": {**EXPERTS, "qk_layernorm": True, "moe_ffn_hidden_size": 24, "moe_router_topk": 3},
    "qwen3-moe, weights of all, every other layer, with a window, untied": {
        **EXPERTS,
        "qk_layernorm": True,
        "kv_channels": 12,
        "expert_interval": 2,
        "moe_router_pre_softmax": True,
        "sliding_window": 3,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen2-moe, weights that sum to 1, no biases, first layer dense": {**SHARED, "num_experts": [1, 4, 4]},
}
"""Models of which neither the classic layout nor recorded steps of generation know."""


def saved_model(folder: Path, model: dict[str, Any], precision: dict[str, Any] | None = None, layers: int = 3) -> Path:
    """A checkpoint of a random model, whose vocabulary is padded in memory."""
    torch.manual_seed(1)
    shape = {
        "num_layers": layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "make_vocab_size_divisible_by": 64,
    }
    changes = {
        "model": {**shape, **model},
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1},
        **({"precision": precision} if precision else {}),
    }
    engines = tiny_engines(changes)
    with torch.no_grad():
        for parameter in engines.stages[0].parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    save_checkpoint(folder, 7, model_tensors(engines.stages), {"separate_main": False}, engines.config.to_yaml())
    return folder


def convert(load: Path, save: Path, to: str, *flags: str) -> None:
    """Runs the tool."""
    assert main(["--load", str(load), "--save", str(save), "--to", to, *flags]) == 0

"""Configurations of transformers' models: model type, and changes of the small sizes."""

from __future__ import annotations

from typing import Any

from tests.unit.convert.support import LENGTH

QWEN2_MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA_SIZES: dict[str, Any] = {"head_dim": 12, "query_pre_attn_scalar": 7, "sliding_window": 5, "pad_token_id": None}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN: dict[str, Any] = {
    "rope_theta": 60.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama, 2 groups": ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
    "llama 3": (
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 50.0, "rope_type": "llama3", "original_max_position_embeddings": 32, **LLAMA3,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llama of transformers 4": ("llama", {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2}}),
    "llama, yarn": ("llama", {"max_position_embeddings": 64, "rope_parameters": {**YARN, "beta_fast": 4.0}}),
    "qwen2, yarn of DeepSeek's kind, not rounded": (
        "qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen3 of transformers 4, yarn": (
        "qwen3",
        {
            "head_dim": 24, "max_position_embeddings": 64, "rope_theta": 90.0,
            "rope_scaling": {"type": "yarn", "factor": 3.5, "original_max_position_embeddings": 20, "beta_fast": 2.5},
        },
    ),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral, whose layers are named one by one": (
        "ministral",
        {
            "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 12,
            "rope_parameters": {"rope_theta": 80.0, "rope_type": "default"},
        },
    ),
    "gemma2": ("gemma2", {**GEMMA_SIZES, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma2 without bounds, untied": (
        "gemma2",
        {
            **GEMMA_SIZES, "final_logit_softcapping": None, "attn_logit_softcapping": None,
            "tie_word_embeddings": False, "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"rope_theta": 90.0},
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA_SIZES,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 70.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 12.0},
            },
            "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3 of transformers 4": (
        "gemma3_text",
        {
            **GEMMA_SIZES, "num_hidden_layers": 7, "rope_theta": 50.0, "rope_local_base_freq": 9.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "gemma3, a window as long as the texts": (
        "gemma3_text", {**GEMMA_SIZES, "sliding_window": LENGTH, "rope_theta": 50.0, "sliding_window_pattern": 2},
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen2, sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen2, whose layers are named one by one": (
        "qwen2",
        {
            "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "qwen2, sliding behind the first layer": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3, whose layers are named one by one": (
        "qwen3",
        {
            "head_dim": 8, "use_sliding_window": True, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2-moe, every other of the first layers sliding": (
        "qwen2_moe", {**QWEN2_MOE, "use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 3},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral with a window and wide heads": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 5, "head_dim": 12},
    ),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe, weights that sum to 1, some dense layers, no biases": (
        "qwen2_moe",
        {**QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 4, "qkv_bias": False},
    ),
    "qwen2-moe, every other layer, sliding": (
        "qwen2_moe",
        {
            **QWEN2_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 4,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, sliding": (
        "qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3-moe, weights that sum to 1, some dense layers, sliding": (
        "qwen3_moe",
        {
            **QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 4, "head_dim": 12,
            "use_sliding_window": True, "sliding_window": 4,
        },
    ),
    "pythia": ("gpt_neox", {}),
    "neox, one after the other": (
        "gpt_neox",
        {
            "rope_parameters": {"rope_theta": 300.0, "rope_type": "default", "partial_rotary_factor": 1.0},
            "use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new",
        },
    ),
}  # fmt: skip

"""config.json of architectures with rotary positions, in both directions."""

from __future__ import annotations

import math
from typing import Any

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import MAX_LAYERS, ModelConfig
from megatron.convert.config_fields import gelu_name, is_tanh
from megatron.convert.mixture import (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    mixtral_config,
    mixtral_experts,
    qwen2_moe_config,
    qwen2_moe_experts,
    qwen3_moe_config,
    qwen_experts,
)

MINISTRAL = "ministral"
"""Mistral with windows in some layers."""

# Megatron-CC to Hugging Face


def rotary_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Fields of config.json for the model_type ``kind``."""
    if kind == "gpt_neox":
        return _size_fields(model) | {
            "hidden_act": gelu_name(model),
            "layer_norm_eps": model.norm_epsilon,
            "rotary_emb_base": model.rotary_base,
            "rotary_pct": model.rotary_percent,
            "use_parallel_residual": model.parallel_residual,
            "hidden_dropout": model.hidden_dropout,
            "attention_bias": True,
        }
    common = llama_fields(model) | {"hidden_act": "silu"}
    if kind == "llama":
        return common | {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    if kind in ("mistral", MIXTRAL):
        experts = mixtral_config(model) if kind == MIXTRAL else {}
        return common | {"sliding_window": model.sliding_window} | experts
    if kind == MINISTRAL:
        return common | {"sliding_window": model.sliding_window, "layer_types": layer_types_of(model)}
    slides = model.sliding_window is not None
    common |= {"use_sliding_window": slides, "sliding_window": model.sliding_window}
    if model.window_attn_skip_freq:
        common |= {"layer_types": layer_types_of(model)}
    if kind in ("qwen3", QWEN3_MOE):
        common |= {"attention_bias": False}
    if kind == QWEN3_MOE:
        return common | qwen3_moe_config(model)
    if kind == QWEN2_MOE:
        # Its max_window_layers cannot express that all layers have a window.
        return common | {"layer_types": layer_types_of(model), **qwen2_moe_config(model)}
    return common | {"max_window_layers": 0}


def _size_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields of config.json that all architectures with rotary positions have."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_scaling": rope_scaling(model),
        "attention_dropout": model.attention_dropout,
    }


def llama_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields of config.json that Llama and the architectures derived from it have."""
    return _size_fields(model) | {
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "rope_theta": model.rotary_base,
        "rms_norm_eps": model.norm_epsilon,
    }


def layer_types_of(model: ModelConfig) -> list[str]:
    """``layer_types`` of config.json: the attention of each layer."""
    windows = (model.window_of(layer) for layer in range(model.num_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of config.json; None without scaling."""
    if model.rotary_scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": model.rotary_scaling, "factor": model.rotary_scaling_factor}
    if model.rotary_scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = model.rotary_scaling_original_length
    if model.rotary_scaling == "llama3":
        return scaling | {
            "low_freq_factor": model.rotary_scaling_low_turns,
            "high_freq_factor": model.rotary_scaling_high_turns,
        }
    return scaling | {
        "beta_slow": model.rotary_scaling_low_turns,
        "beta_fast": model.rotary_scaling_high_turns,
        "attention_factor": model.rotary_scaling_attention_factor,
        "truncate": model.yarn_correction_range_round_to_int,
    }


# Hugging Face to Megatron-CC


def rotary_model(config: Values, rope: Values, base: tuple[str, float], percent: float) -> dict[str, object]:
    """Model fields of an architecture with rotary positions.

    Args:
        config, rope: all fields, and the parameters of the rotary positions.
        base: name of the base's field in older files, and its default.
        percent: the rotated fraction of a head.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    positions = config.integer("max_position_embeddings")
    return {
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": config.integer("intermediate_size"),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "rotary_base": rope.number("rope_theta", config.number(*base)),
        "rotary_percent": percent,
        "untie_embeddings_and_output_weights": not config.flag("tie_word_embeddings", False),
        "attention_dropout": config.number("attention_dropout", 0.0),
        **_scaling_of(rope, config.integer("original_max_position_embeddings", positions), positions),
    }


def rope_of(config: Values) -> Values:
    """Parameters of the rotary positions; the older name takes precedence, as in transformers."""
    return Values(config.table("rope_scaling", {}) or config.table("rope_parameters", {}))


def _scaling_of(rope: Values, positions: int, length: int) -> dict[str, object]:
    """Scaling of rotary positions, by default from ``positions`` to ``length``."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return {}
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(f"rope scaling of type {kind!r} cannot be converted; linear, llama3 and yarn can")
    scaling: dict[str, object] = {"rotary_scaling": kind}
    if kind == "linear":
        return scaling | {"rotary_scaling_factor": rope.number("factor")}
    original = rope.integer("original_max_position_embeddings", positions)
    scaling["rotary_scaling_original_length"] = original
    if kind == "yarn":
        factor = rope.number("factor", length / original)
        # If both scales of attention are set, only their quotient matters.
        scales = [rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
        used_scales = scales if all(scales) else (1.0, 0.0)
        over, under = (1 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in used_scales)
        return scaling | {
            "rotary_scaling_factor": factor,
            "rotary_scaling_low_turns": rope.number("beta_slow", 0.0) or 1.0,
            "rotary_scaling_high_turns": rope.number("beta_fast", 0.0) or 32.0,
            "rotary_scaling_attention_factor": rope.number("attention_factor", over / under),
            "yarn_correction_range_round_to_int": rope.flag("truncate", True),
        }
    return scaling | {
        "rotary_scaling_factor": rope.number("factor"),
        "rotary_scaling_low_turns": rope.number("low_freq_factor"),
        "rotary_scaling_high_turns": rope.number("high_freq_factor"),
    }


def check_all_channels(config: Values, rope: Values) -> None:
    """Raise UserError if only part of each head is rotated."""
    percent = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if percent != 1.0:
        raise UserError(f"partial_rotary_factor {percent:g} cannot be converted; only 1 can")


def neox_model(config: Values) -> dict[str, object]:
    """Model fields of GPTNeoX; raises UserError for a feature that our models lack."""
    if not config.flag("attention_bias", True):
        raise UserError("attention_bias=false cannot be converted: our models have biases in all linear layers or none")
    rope = rope_of(config)
    percent = rope.number("partial_rotary_factor", config.number("rotary_pct", 0.25))
    return {
        **rotary_model(config, rope, ("rotary_emb_base", 10000.0), percent),
        "norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "bias_gelu_fusion": is_tanh(config, "hidden_act", "gelu"),
        "parallel_residual": config.flag("use_parallel_residual", True),
        "hidden_dropout": config.number("hidden_dropout", 0.0),
    }


def _swiglu_model(
    config: Values, groups: int, base: float = 10000.0, epsilon: float = 1e-6, width: int | None = None
) -> dict[str, object]:
    """Model fields of Llama-like architectures; groups, base, epsilon and head width are the file's defaults."""
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act {activation!r} cannot be converted; only silu can")
    rope = rope_of(config)
    check_all_channels(config, rope)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return {
        **rotary_model(config, rope, ("rope_theta", base), 1.0),
        "num_query_groups": config.integer("num_key_value_heads", groups),
        "kv_channels": config.integer("head_dim", width or max(hidden // heads, 1)),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", epsilon),
        "swiglu": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }


def llama_model(config: Values) -> dict[str, object]:
    """Model fields of Llama; raises UserError for a feature that our models lack."""
    biases = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False) != biases:
        raise UserError("attention_bias and mlp_bias differ, which cannot be converted: give both or none")
    return {**_swiglu_model(config, config.integer("num_attention_heads")), "add_bias_linear": biases}


def mistral_model(config: Values) -> dict[str, object]:
    """Model fields of Mistral, or Ministral with layer_types; raises UserError for a feature that our models lack."""
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return {**_swiglu_model(config, 8), **_layer_windows(config, [1] * layers)}


def qwen2_model(config: Values) -> dict[str, object]:
    """Model fields of Qwen2; raises UserError for a feature that our models lack."""
    layers = config.integer("num_hidden_layers")
    sliding = range(config.integer("max_window_layers", 28, minimum=0), layers)
    return {**_swiglu_model(config, 32), "add_qkv_bias": True, **_qwen_windows(config, sliding)}


def qwen3_model(config: Values) -> dict[str, object]:
    """Model fields of Qwen3; raises UserError for a feature that our models lack."""
    layers = config.integer("num_hidden_layers")
    sliding = range(config.integer("max_window_layers", 28, minimum=0), layers)
    return {**_swiglu_model(config, 32, width=128), **_qk_norm_fields(config), **_qwen_windows(config, sliding)}


def qwen3_moe_model(config: Values) -> dict[str, object]:
    """Model fields of Qwen3-MoE; raises UserError for a feature that our models lack."""
    slides = config.flag("use_sliding_window", False)
    return {
        **_swiglu_model(config, 4),
        **_qk_norm_fields(config),
        **(_read_window(config) if slides else {}),
        **qwen_experts(config, 8, 128, 768),
    }


def _qk_norm_fields(config: Values) -> dict[str, object]:
    """Model fields of normalized queries and keys."""
    if config.flag("attention_bias", False):
        raise UserError(
            "attention_bias=true cannot be converted: our models have biases in all linear layers, or in those to "
            "queries, keys and values alone"
        )
    return {"qk_layernorm": True}


def mixtral_model(config: Values) -> dict[str, object]:
    """Model fields of Mixtral; raises UserError for a feature that our models lack."""
    window = _read_window(config) if config.has("sliding_window") else {}
    return {**_swiglu_model(config, 8, 1e6, 1e-5), **window, **mixtral_experts(config)}


def qwen2_moe_model(config: Values) -> dict[str, object]:
    """Model fields of Qwen2-MoE; raises UserError for a feature that our models lack."""
    # Unlike Qwen2: every second one of the first layers.
    sliding = range(0, min(config.integer("num_hidden_layers"), config.integer("max_window_layers", 28, minimum=0)), 2)
    return {
        **_swiglu_model(config, 16),
        "add_qkv_bias": config.flag("qkv_bias", True),
        **_qwen_windows(config, sliding),
        **qwen2_moe_experts(config),
    }


def _qwen_windows(config: Values, sliding: range) -> dict[str, object]:
    """Sliding window of Qwen2, by default in the layers of ``sliding``."""
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    windows = _layer_windows(config, [int(layer in sliding) for layer in range(layers)])
    return windows if config.flag("use_sliding_window", False) else {}


def _layer_windows(config: Values, pattern: list[int]) -> dict[str, object]:
    """Sliding window of layers, by default in the layers with a 1 in the pattern."""
    if config.has("layer_types"):
        pattern = layer_type_windows(config, len(pattern))
    if 1 not in pattern:
        return {}
    window = _read_window(config)
    return window | {"window_attn_skip_freq": pattern} if window else {}


def layer_type_windows(config: Values, layers: int) -> list[int]:
    """1 for each layer that ``layer_types`` gives a window, else 0."""
    kinds = config.texts("layer_types")
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(f"layer_types must name full_attention or sliding_attention for each of the {layers} layers")
    return [int(kind == "sliding_attention") for kind in kinds]


def _read_window(config: Values) -> dict[str, object]:
    """Sliding window, 4096 if missing; empty if it is null or covers all positions."""
    if "sliding_window" in config and not config.has("sliding_window"):
        return {}
    window = config.integer("sliding_window", 4096)
    return {} if window >= config.integer("max_position_embeddings") else {"sliding_window": window}

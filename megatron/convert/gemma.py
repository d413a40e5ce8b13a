"""config.json of Gemma 2 and of Gemma 3's text model, in both directions."""

from __future__ import annotations

from typing import Any

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import MAX_LAYERS, ModelConfig
from megatron.convert.config_fields import is_tanh
from megatron.convert.rotary import (
    check_all_channels,
    layer_type_windows,
    layer_types_of,
    llama_fields,
    rope_of,
    rotary_model,
)

GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
GEMMA3_IMAGES = "gemma3"
"""Gemma 3 with its image encoder."""


# Megatron-CC to Hugging Face


def non_gemma_requirements(model: ModelConfig) -> dict[str, bool]:
    """Requirements of all architectures except Gemma's, and whether the model meets them."""
    return {
        "no --geglu": not model.geglu,
        "no --apply-layernorm-1p": not model.apply_layernorm_1p,
        "no --sandwich-norm": not model.sandwich_norm,
        "no --apply-embedding-scaling": not model.apply_embedding_scaling,
        "no --query-pre-attn-scalar": model.query_pre_attn_scalar in (None, model.kv_channels),
        "no --attn-logit-softcapping": model.attn_logit_softcapping is None,
        "no --final-logit-softcapping": model.final_logit_softcapping is None,
        "no --rope-local-base-freq": model.rope_local_base_freq is None,
    }


def gemma_requirements(model: ModelConfig) -> dict[str, dict[str, bool]]:
    """Requirements of Gemma 2 and 3 in addition to those of all gated models with rotary positions."""
    shared = {
        "--geglu": model.geglu,
        "--apply-layernorm-1p": model.apply_layernorm_1p,
        "--sandwich-norm": model.sandwich_norm,
        "--apply-embedding-scaling": model.apply_embedding_scaling,
        "a --hidden-size that --num-attention-heads divides": model.hidden_size % model.num_attention_heads == 0,
    }
    scales_all = model.rotary_scaling != "none" and model.rope_local_base_freq is None
    return {
        GEMMA2: {**shared, "no --rope-local-base-freq": model.rope_local_base_freq is None},
        GEMMA3: {
            **shared,
            "no --attn-logit-softcapping": model.attn_logit_softcapping is None,
            "--rope-local-base-freq, as it has no --rotary-scaling of layers with a window": (
                not scales_all or model.sliding_window is None
            ),
        },
    }


def gemma_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Fields of config.json for ``kind``, the model_type of Gemma 2 or 3."""
    common = llama_fields(model) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.kv_channels,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "sliding_window": model.sliding_window or model.max_position_embeddings,  # Gemma refuses null
        "layer_types": layer_types_of(model),
    }
    if kind == GEMMA2:
        return common
    return common | {"rope_local_base_freq": model.rope_local_base_freq or model.rotary_base}


# Hugging Face to Megatron-CC


_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2: dict[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: dict[str, Any] = {**_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}


def text_config(config: Values) -> Values:
    """Configuration of the text model of a Gemma 3 with an image encoder; other configurations are unchanged."""
    if config.get("model_type") != GEMMA3_IMAGES:
        return config
    tied = {"tie_word_embeddings": config.flag("tie_word_embeddings", True)}
    return Values({**_GEMMA3, **config.table("text_config"), "model_type": GEMMA3, **tied})


def gemma2_model(config: Values) -> dict[str, object]:
    """Model fields of Gemma 2; raises UserError for a feature that our models lack."""
    config = Values({**_GEMMA2, **config})
    rope = rope_of(config)
    return {
        **_gemma_model(config, rope, 10000.0),
        **_windows(config, 2),
        "attn_logit_softcapping": _optional_number(config, "attn_logit_softcapping"),
    }


def gemma3_model(config: Values) -> dict[str, object]:
    """Model fields of Gemma 3's text model; raises UserError for a feature that our models lack."""
    config = Values({**_GEMMA3, **config})
    if config.has("attn_logit_softcapping"):
        raise UserError("attn_logit_softcapping cannot be converted: transformers does not apply it in Gemma 3")
    kinds = Values(config.table("rope_parameters", {}))
    if kinds.has("rope_theta") or kinds.has("rope_type"):
        raise UserError("rope_parameters must be those of full_attention and of sliding_attention")
    rope = Values({**kinds.table("full_attention", {}), **config.table("rope_scaling", {})})
    local = Values(kinds.table("sliding_attention", {}))
    scaling = local.text("rope_type", "default")
    if scaling != "default":
        raise UserError(f"rope scaling of type {scaling!r} of sliding_attention cannot be converted; only default can")
    check_all_channels(config, local)
    model = _gemma_model(config, rope, 1_000_000.0)
    windows = _windows(config, config.integer("sliding_window_pattern", 6))
    base = local.number("rope_theta", config.number("rope_local_base_freq", 10000.0))
    same = base == model["rotary_base"] and "rotary_scaling" not in model
    return {
        **model,
        **windows,
        "qk_layernorm": True,
        "rope_local_base_freq": base if windows and not same else None,
    }


def _gemma_model(config: Values, rope: Values, base: float) -> dict[str, object]:
    """Model fields that Gemma 2 and 3 share; ``base`` is the default base of the rotary positions."""
    if not is_tanh(config, "hidden_activation", "gelu_pytorch_tanh"):
        raise UserError("hidden_activation 'gelu' cannot be converted; only gelu_pytorch_tanh can")
    for name in ("attention_bias", "use_bidirectional_attention"):
        if config.flag(name, False):
            raise UserError(f"{name}=true cannot be converted: our models do not support it in Gemma's layers")
    check_all_channels(config, rope)
    width, scalar = config.integer("head_dim"), config.integer("query_pre_attn_scalar")
    return {
        **rotary_model(config, rope, ("rope_theta", base), 1.0),
        "num_query_groups": config.integer("num_key_value_heads"),
        "kv_channels": width,
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps"),
        "apply_layernorm_1p": True,
        "sandwich_norm": True,
        "geglu": True,
        "apply_embedding_scaling": True,
        "query_pre_attn_scalar": None if scalar == width else scalar,
        "final_logit_softcapping": _optional_number(config, "final_logit_softcapping"),
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }


def _optional_number(config: Values, name: str) -> float | None:
    return config.number(name) if config.has(name) else None


def _windows(config: Values, period: int) -> dict[str, object]:
    """Sliding window, by default in all layers except the last layer of each period.

    A window that covers all positions is kept: its layers may have another base of rotary positions.
    """
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    pattern = [int((layer + 1) % period != 0) for layer in range(layers)]
    if config.has("layer_types"):
        pattern = layer_type_windows(config, layers)
    if 1 not in pattern:
        return {}
    return {"sliding_window": config.integer("sliding_window"), "window_attn_skip_freq": pattern}

"""Hugging Face architectures of models, and config.json in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.checkpoint.convert.bert import MEGATRON_BERT, bert_config, bert_model
from megatron.checkpoint.convert.config_words import DTYPE_NAMES, gelu_name, is_tanh
from megatron.checkpoint.convert.deberta import DEBERTA, deberta_config, deberta_model
from megatron.checkpoint.convert.model import model_of
from megatron.checkpoint.convert.task_head import head_words, named_head
from megatron.config.model import ModelConfig

_GPT2_CLASSIFIER = "GPT2ForSequenceClassification"
GPT2_END = 50256
"""GPT-2's end of text, which ends documents where no tokenizer says otherwise."""


# From ours


def architecture_of(model: ModelConfig) -> str:
    """The architecture of a model: the first of those of its kind that computes the same.

    Raises:
        UserError: when none does, with what keeps it from the closest.
    """
    missing = {name: [what for what, met in wanted.items() if not met] for name, wanted in _requirements(model).items()}
    for name, what in missing.items():
        if not what:
            return name
    closest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"Hugging Face has no architecture for this model: it is closest to {ARCHITECTURES[closest]}, which has "
        f"{', '.join(missing[closest])}; keep it in our own format, or train one of these"
    )


def _requirements(model: ModelConfig) -> dict[str, dict[str, bool]]:
    """Requirements of each architecture, by model_type, and whether the model meets them."""
    rope = {"--position-embedding-type rope": model.position_embedding_type == "rope"}
    one_after_the_other = {"no --parallel-residual": not model.parallel_residual}
    looks_at_all = {"no --sliding-window": model.sliding_window is None}
    no_biases = {"--disable-bias-linear": not model.add_bias_linear}
    language = {"no --task-head": model.predicts_words}
    no_choice = {"no --task-head choice": model.task_head != "choice"}
    gelu = {
        "--normalization LayerNorm": model.normalization == "LayerNorm",
        "no --swiglu": not model.swiglu,
        "no --squared-relu": not model.squared_relu,
        "biases": model.add_bias_linear,
        "a key and value for each head": model.num_query_groups == model.num_attention_heads,
        "--kv-channels of hidden size / heads": model.num_attention_heads * model.kv_channels == model.hidden_size,
    }
    swiglu = {
        **language,
        **rope,
        "--rotary-percent 1": model.rotary_percent == 1.0,
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--swiglu": model.swiglu,
        **one_after_the_other,
    }
    learned = {"--position-embedding-type learned_absolute": model.position_embedding_type == "learned_absolute"}
    if model.model_type == "bert":
        tied = {"no --untie-embeddings-and-output-weights": not model.untie_embeddings_and_output_weights}
        types = {"--num-tokentypes of at least 2": model.num_tokentypes >= 2}
        return {MEGATRON_BERT: {**learned, **gelu, **one_after_the_other, **tied, **types}}
    if model.model_type == "deberta":
        return {DEBERTA: {**gelu, **no_choice}}
    return {
        "gpt2": {**no_choice, **learned, **gelu, **one_after_the_other, **looks_at_all},
        "gpt_neox": {**language, **rope, **gelu, **looks_at_all},
        "llama": {**swiglu, **looks_at_all, "no --add-qkv-bias": not model.add_qkv_bias},
        "mistral": {**swiglu, **no_biases, "no --add-qkv-bias": not model.add_qkv_bias},
        "qwen2": {**swiglu, **no_biases, "--add-qkv-bias": model.add_qkv_bias},
    }


def hf_config(model: ModelConfig, vocab_size: int, dtype: torch.dtype, end: int | None) -> dict[str, Any]:
    """Builds the content of config.json.

    Args:
        model, vocab_size: the model, and the entries of its vocabulary.
        dtype: dtype of the weights.
        end: the token that ends a document, where it is known.
    """
    kind = architecture_of(model)
    if kind == MEGATRON_BERT:
        return bert_config(model, vocab_size, dtype)
    if kind == DEBERTA:
        return deberta_config(model, vocab_size, dtype)
    end = min(vocab_size - 1, GPT2_END) if end is None and kind == "gpt2" else end
    return {
        "architectures": [f"{ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "torch_dtype": DTYPE_NAMES.get(dtype, "float32"),
        "bos_token_id": end,
        "eos_token_id": end,
        **(_gpt2_config(model, end) if kind == "gpt2" else _rotary_config(model, kind)),
    }


def _gpt2_config(model: ModelConfig, end: int | None) -> dict[str, Any]:
    # A classifier reads the last token that is not padding, which is the end of a text: another one pads.
    head = {} if model.predicts_words else {**head_words(model), "pad_token_id": int(end == 0)}
    return {
        "architectures": ["GPT2LMHeadModel" if model.predicts_words else _GPT2_CLASSIFIER],
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "activation_function": gelu_name(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        **head,
    }


def _rotary_config(model: ModelConfig, kind: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_scaling": _rope_scaling(model),
        "attention_dropout": model.attention_dropout,
    }
    if kind == "gpt_neox":
        return common | {
            "hidden_act": gelu_name(model),
            "layer_norm_eps": model.norm_epsilon,
            "rotary_emb_base": model.rotary_base,
            "rotary_pct": model.rotary_percent,
            "use_parallel_residual": model.parallel_residual,
            "hidden_dropout": model.hidden_dropout,
            "attention_bias": True,
        }
    common |= {
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "rope_theta": model.rotary_base,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
    }
    if kind == "llama":
        return common | {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    if kind == "mistral":
        return common | {"sliding_window": model.sliding_window}
    slides = model.sliding_window is not None
    return common | {"use_sliding_window": slides, "sliding_window": model.sliding_window, "max_window_layers": 0}


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rotary_scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": model.rotary_scaling, "factor": model.rotary_scaling_factor}
    if model.rotary_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rotary_scaling_low_turns,
            "high_freq_factor": model.rotary_scaling_high_turns,
            "original_max_position_embeddings": model.rotary_scaling_original_length,
        }
    return scaling


# From theirs


def model_of_config(config: Values) -> ModelConfig:
    """Reads the model that a config.json describes.

    Raises:
        UserError: when it is another kind, or has what ours do not.
    """
    kind = config.text("model_type")
    if kind not in _READERS:
        raise UserError(f"model_type {kind!r} cannot be converted; {', '.join(_READERS)} can")
    return model_of(**_READERS[kind](config))


def _gpt2_model(config: Values) -> dict[str, object]:
    if not config.flag("scale_attn_weights", True) or config.flag("scale_attn_by_inverse_layer_idx", False):
        raise UserError("scale_attn_weights=false and scale_attn_by_inverse_layer_idx=true cannot be converted")
    hidden, positions = config.integer("n_embd"), config.integer("n_positions")
    return {
        **named_head(config, {"classification": _GPT2_CLASSIFIER}),
        "num_layers": config.integer("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": config.integer("n_head"),
        "ffn_hidden_size": config.integer("n_inner", 4 * hidden),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "bias_gelu_fusion": is_tanh(config, "activation_function", "gelu_new"),
        "untie_embeddings_and_output_weights": not config.flag("tie_word_embeddings", True),
        "attention_dropout": config.number("attn_pdrop", 0.1),
        "hidden_dropout": config.number("resid_pdrop", 0.1),
    }


def _rotary_model(config: Values, rope: Values, base: str, percent: float) -> dict[str, object]:
    """The model of an architecture with rotary positions; ``percent`` is the rotated share of a head."""
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
        "rotary_base": rope.number("rope_theta", config.number(base, 10000.0)),
        "rotary_percent": percent,
        "untie_embeddings_and_output_weights": not config.flag("tie_word_embeddings", False),
        "attention_dropout": config.number("attention_dropout", 0.0),
        **_scaling_of(rope, config.integer("original_max_position_embeddings", positions)),
    }


def _rope_of(config: Values) -> Values:
    """Parameters of the rotary positions: under the older name where there are both, as in transformers."""
    return Values(config.table("rope_scaling", {}) or config.table("rope_parameters", {}))


def _scaling_of(rope: Values, positions: int) -> dict[str, object]:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return {}
    if kind not in ("linear", "llama3"):
        raise UserError(f"rope scaling of type {kind!r} cannot be converted; linear and llama3 can")
    scaling: dict[str, object] = {"rotary_scaling": kind, "rotary_scaling_factor": rope.number("factor")}
    if kind == "llama3":
        scaling |= {
            "rotary_scaling_low_turns": rope.number("low_freq_factor"),
            "rotary_scaling_high_turns": rope.number("high_freq_factor"),
            "rotary_scaling_original_length": rope.integer("original_max_position_embeddings", positions),
        }
    return scaling


def _neox_model(config: Values) -> dict[str, object]:
    if not config.flag("attention_bias", True):
        raise UserError("attention_bias=false cannot be converted: our models have biases in all linear layers or none")
    rope = _rope_of(config)
    percent = rope.number("partial_rotary_factor", config.number("rotary_pct", 0.25))
    return {
        **_rotary_model(config, rope, "rotary_emb_base", percent),
        "norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "bias_gelu_fusion": is_tanh(config, "hidden_act", "gelu"),
        "parallel_residual": config.flag("use_parallel_residual", True),
        "hidden_dropout": config.number("hidden_dropout", 0.0),
    }


def _swiglu_model(config: Values, groups: int) -> dict[str, object]:
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act {activation!r} cannot be converted; only silu can")
    rope = _rope_of(config)
    percent = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if percent != 1.0:
        raise UserError(f"partial_rotary_factor {percent:g} cannot be converted; only 1 can")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return {
        **_rotary_model(config, rope, "rope_theta", 1.0),
        "num_query_groups": config.integer("num_key_value_heads", groups),
        "kv_channels": config.integer("head_dim", max(hidden // heads, 1)),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }


def _llama_model(config: Values) -> dict[str, object]:
    biases = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False) != biases:
        raise UserError("attention_bias and mlp_bias differ, which cannot be converted: give both or none")
    return {**_swiglu_model(config, config.integer("num_attention_heads")), "add_bias_linear": biases}


def _mistral_model(config: Values) -> dict[str, object]:
    if config.has("layer_types"):
        raise UserError("layer_types cannot be converted: all our layers look at as many positions")
    return {**_swiglu_model(config, 8), **_window_of(config, 4096)}


def _qwen2_model(config: Values) -> dict[str, object]:
    model = {**_swiglu_model(config, 32), "add_qkv_bias": True}
    layers = config.integer("num_hidden_layers")
    name, sliding = _sliding_layers(config, layers)
    if not config.flag("use_sliding_window", False) or not sliding:
        return model
    if sliding < layers:
        raise UserError(
            f"{name} gives {sliding} of {layers} layers a window, which cannot be converted: "
            "all our layers look at as many positions"
        )
    return model | _window_of(config, 4096)


def _sliding_layers(config: Values, layers: int) -> tuple[str, int]:
    """The key that says how many layers have a sliding window, and that number."""
    if not config.has("layer_types"):
        return "max_window_layers", max(layers - config.integer("max_window_layers", 28, least=0), 0)
    kinds = config.texts("layer_types")
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(f"layer_types must name full_attention or sliding_attention for each of the {layers} layers")
    return "layer_types", kinds.count("sliding_attention")


def _window_of(config: Values, default: int) -> dict[str, object]:
    """The sliding window; None where it holds all positions, or is null. A missing one is the default."""
    if config.says("sliding_window") and not config.has("sliding_window"):
        return {}
    window = config.integer("sliding_window", default)
    return {} if window >= config.integer("max_position_embeddings") else {"sliding_window": window}


_READERS: Mapping[str, Callable[[Values], dict[str, object]]] = {
    "gpt2": _gpt2_model,
    "gpt_neox": _neox_model,
    "llama": _llama_model,
    "mistral": _mistral_model,
    "qwen2": _qwen2_model,
    MEGATRON_BERT: bert_model,
    DEBERTA: deberta_model,
}
ARCHITECTURES = {
    "gpt2": "GPT-2",
    "gpt_neox": "GPTNeoX",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    MEGATRON_BERT: "MegatronBert",
    DEBERTA: "DeBERTa-v2",
}
"""Their names by model_type."""

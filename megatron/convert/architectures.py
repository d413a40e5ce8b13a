"""Hugging Face architectures of models, and config.json in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import ModelConfig
from megatron.convert.bert import MEGATRON_BERT, bert_config, bert_model
from megatron.convert.config_fields import DTYPE_NAMES, gelu_name, is_tanh
from megatron.convert.deberta import DEBERTA, deberta_config, deberta_model
from megatron.convert.gemma import (
    GEMMA2,
    GEMMA3,
    gemma2_model,
    gemma3_model,
    gemma_config,
    gemma_requirements,
    non_gemma_requirements,
)
from megatron.convert.mixture import MIXTRAL, QWEN2_MOE, QWEN3_MOE, expert_requirements
from megatron.convert.model import model_of
from megatron.convert.rotary import (
    MINISTRAL,
    llama_model,
    mistral_model,
    mixtral_model,
    neox_model,
    qwen2_model,
    qwen2_moe_model,
    qwen3_model,
    qwen3_moe_model,
    rotary_config,
)
from megatron.convert.task_head import head_fields, read_task_head

_GPT2_CLASSIFIER = "GPT2ForSequenceClassification"
GPT2_END = 50256
"""GPT-2's end-of-text id, which ends documents by default."""


# Megatron-CC to Hugging Face


def architecture_of(model: ModelConfig) -> str:
    """The first architecture equivalent to a model.

    Raises:
        UserError: when there is none; the message lists the unmet requirements of the closest architecture.
    """
    missing = {
        name: [requirement for requirement, met in requirements.items() if not met]
        for name, requirements in _requirements(model).items()
    }
    for name, unmet in missing.items():
        if not unmet:
            return name
    closest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"Hugging Face has no architecture for this model: it is closest to {ARCHITECTURES[closest]}, which has "
        f"{', '.join(missing[closest])}; keep it in our own format, or train one of these"
    )


def _requirements(model: ModelConfig) -> dict[str, dict[str, bool]]:
    """Requirements of each architecture, by model_type, and whether the model meets them."""
    rope = {"--position-embedding-type rope": model.position_embedding_type == "rope"}
    sequential = {"no --parallel-residual": not model.parallel_residual}
    full_attention = {"no --sliding-window": model.sliding_window is None}
    same_attention = {"no --window-attn-skip-freq": not model.window_attn_skip_freq}
    no_biases = {"--disable-bias-linear": not model.add_bias_linear}
    language_model = {"no --task-head": model.predicts_words}
    dense = {"no --num-experts": not model.has_experts}
    no_choice_head = {"no --task-head choice": model.task_head != "choice"}
    no_qk_norm = {"no --qk-layernorm": not model.qk_layernorm}
    non_gemma = non_gemma_requirements(model)
    gelu = {
        **no_qk_norm,
        **non_gemma,
        "--normalization LayerNorm": model.normalization == "LayerNorm",
        "no --swiglu": not model.swiglu,
        "no --squared-relu": not model.squared_relu,
        "biases": model.add_bias_linear,
        "a key and value for each head": model.num_query_groups == model.num_attention_heads,
        "--kv-channels of hidden size / heads": model.num_attention_heads * model.kv_channels == model.hidden_size,
    }
    gated = {
        **language_model,
        **rope,
        "--rotary-percent 1": model.rotary_percent == 1.0,
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        **sequential,
    }
    swiglu = {**gated, "--swiglu": model.swiglu, **non_gemma, **no_qk_norm}
    learned = {"--position-embedding-type learned_absolute": model.position_embedding_type == "learned_absolute"}
    if model.model_type == "bert":
        tied = {"no --untie-embeddings-and-output-weights": not model.untie_embeddings_and_output_weights}
        types = {"--num-tokentypes of at least 2": model.num_tokentypes >= 2}
        return {MEGATRON_BERT: {**learned, **gelu, **sequential, **tied, **types}}
    if model.model_type == "deberta":
        return {DEBERTA: {**gelu, **no_choice_head}}
    no_qkv_bias = {"no --add-qkv-bias": not model.add_qkv_bias}
    qk_norm = {**no_biases, **no_qkv_bias, "--qk-layernorm": model.qk_layernorm}
    qwen3 = {**gated, "--swiglu": model.swiglu, **non_gemma, **qk_norm}
    experts, gemma = expert_requirements(model), gemma_requirements(model)
    return {
        MIXTRAL: {**swiglu, **same_attention, **no_biases, **no_qkv_bias, **experts[MIXTRAL]},
        QWEN2_MOE: {**swiglu, **no_biases, **experts[QWEN2_MOE]},
        "gpt2": {**no_choice_head, **dense, **learned, **gelu, **sequential, **full_attention},
        "gpt_neox": {**language_model, **dense, **rope, **gelu, **full_attention},
        "llama": {**swiglu, **dense, **full_attention, **no_qkv_bias},
        "mistral": {**swiglu, **same_attention, **dense, **no_biases, **no_qkv_bias},
        MINISTRAL: {**swiglu, **dense, **no_biases, **no_qkv_bias},
        "qwen2": {**swiglu, **dense, **no_biases, "--add-qkv-bias": model.add_qkv_bias},
        "qwen3": {**qwen3, **dense},
        QWEN3_MOE: {**qwen3, **same_attention, **experts[QWEN3_MOE]},
        GEMMA2: {**gated, **gemma[GEMMA2], **dense, **no_biases, **no_qkv_bias, **no_qk_norm},
        GEMMA3: {**gated, **gemma[GEMMA3], **dense, **qk_norm},
    }


def hf_config(model: ModelConfig, vocab_size: int, dtype: torch.dtype, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Build the content of config.json.

    Args:
        model, vocab_size: the model, and the number of its vocabulary entries.
        dtype: dtype of the weights.
        ids: bos_token_id, eos_token_id and pad_token_id of its tokenizer, if known.
    """
    kind = architecture_of(model)
    if kind == MEGATRON_BERT:
        return bert_config(model, vocab_size, dtype)
    if kind == DEBERTA:
        return deberta_config(model, vocab_size, dtype)
    end = min(vocab_size - 1, GPT2_END) if kind == "gpt2" else None
    common: dict[str, Any] = {
        "architectures": [f"{ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "torch_dtype": DTYPE_NAMES.get(dtype, "float32"),
        "bos_token_id": end,
        "eos_token_id": end,
        **ids,
    }
    if kind != "gpt2":
        return common | (gemma_config(model, kind) if kind in (GEMMA2, GEMMA3) else rotary_config(model, kind))
    # A classifier reads the last token that is not padding, the end of text, so padding needs another id.
    padding = int(ids.get("eos_token_id", end) == 0)
    return {
        **common,
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
        **({} if model.predicts_words else {**head_fields(model), "pad_token_id": padding}),
    }


# Hugging Face to Megatron-CC


def model_of_config(config: Values) -> ModelConfig:
    """Build the model configuration from config.json.

    Raises:
        UserError: when its type is not supported, or it has a feature that our models lack.
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
        **read_task_head(config, {"classification": _GPT2_CLASSIFIER}),
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


_READERS: Mapping[str, Callable[[Values], dict[str, object]]] = {
    "gpt2": _gpt2_model,
    "gpt_neox": neox_model,
    "llama": llama_model,
    "mistral": mistral_model,
    MINISTRAL: mistral_model,
    "qwen2": qwen2_model,
    MIXTRAL: mixtral_model,
    QWEN2_MOE: qwen2_moe_model,
    "qwen3": qwen3_model,
    QWEN3_MOE: qwen3_moe_model,
    GEMMA2: gemma2_model,
    GEMMA3: gemma3_model,
    MEGATRON_BERT: bert_model,
    DEBERTA: deberta_model,
}
ARCHITECTURES = {
    "gpt2": "GPT-2",
    "gpt_neox": "GPTNeoX",
    "llama": "Llama",
    "mistral": "Mistral",
    MINISTRAL: "Ministral",
    "qwen2": "Qwen2",
    MIXTRAL: "Mixtral",
    QWEN2_MOE: "Qwen2Moe",
    "qwen3": "Qwen3",
    QWEN3_MOE: "Qwen3Moe",
    GEMMA2: "Gemma2",
    GEMMA3: "Gemma3",
    MEGATRON_BERT: "MegatronBert",
    DEBERTA: "DeBERTa-v2",
}
"""Architecture names by model_type."""

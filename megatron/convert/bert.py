"""config.json of Megatron's BERT, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import ModelConfig
from megatron.config.model_types import TaskHead
from megatron.convert.config_fields import DTYPE_NAMES, gelu_name, is_tanh
from megatron.convert.task_head import head_fields, read_task_head

MEGATRON_BERT = "megatron-bert"
_WITH_BINARY_HEAD, _WITHOUT_BINARY_HEAD = "MegatronBertForPreTraining", "MegatronBertForMaskedLM"
_CLASSIFIER = "MegatronBertForSequenceClassification"
_TASK_ARCHITECTURES: Mapping[TaskHead, str] = {
    "classification": _CLASSIFIER,
    "regression": _CLASSIFIER,
    "choice": "MegatronBertForMultipleChoice",
}


def bert_config(model: ModelConfig, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Build the content of config.json."""
    pretrained = _WITH_BINARY_HEAD if model.bert_binary_head else _WITHOUT_BINARY_HEAD
    return {
        "architectures": [_TASK_ARCHITECTURES.get(model.task_head, pretrained)],
        "model_type": MEGATRON_BERT,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": DTYPE_NAMES.get(dtype, "float32"),
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": model.num_tokentypes,
        "hidden_act": gelu_name(model),
        "layer_norm_eps": model.norm_epsilon,
        "attention_probs_dropout_prob": model.attention_dropout,
        "hidden_dropout_prob": model.hidden_dropout,
        "pad_token_id": None,
        **head_fields(model),
    }


def bert_model(config: Values) -> dict[str, object]:
    """Model fields from config.json; raises UserError for a feature that our models lack."""
    if config.flag("is_decoder", False) or config.flag("add_cross_attention", False):
        raise UserError("is_decoder=true and add_cross_attention=true cannot be converted: BERT is an encoder")
    if not config.flag("tie_word_embeddings", True):
        raise UserError("tie_word_embeddings=false cannot be converted: BERT's output projection is its embedding")
    positions = config.integer("max_position_embeddings", 512)
    architectures = config.texts("architectures") if config.has("architectures") else []
    return {
        **read_task_head(config, _TASK_ARCHITECTURES),
        "model_type": "bert",
        "bert_binary_head": _WITHOUT_BINARY_HEAD not in architectures,
        "num_tokentypes": config.integer("type_vocab_size", 2),
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": config.integer("hidden_size"),
        "num_attention_heads": config.integer("num_attention_heads"),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "norm_epsilon": config.number("layer_norm_eps", 1e-12),
        "bias_gelu_fusion": is_tanh(config, "hidden_act", "gelu"),
        "attention_dropout": config.number("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": config.number("hidden_dropout_prob", 0.1),
    }

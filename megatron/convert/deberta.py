"""config.json of DeBERTa-v2 and -v3, in both directions."""

from __future__ import annotations

from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import ModelConfig
from megatron.convert.config_fields import DTYPE_NAMES, gelu_name, is_tanh
from megatron.convert.task_head import head_fields, read_task_head

DEBERTA = "deberta-v2"
_CLASSIFIER, _ENCODER = "DebertaV2ForSequenceClassification", "DebertaV2Model"


def deberta_config(model: ModelConfig, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Build the content of config.json."""
    return {
        "architectures": [_ENCODER if model.task_head == "none" else _CLASSIFIER],
        "model_type": DEBERTA,
        "vocab_size": vocab_size,
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
        "pad_token_id": 0,
        "position_biased_input": model.position_embedding_type == "learned_absolute",
        "relative_attention": True,
        "position_buckets": model.position_buckets or -1,
        "max_relative_positions": model.max_relative_positions,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "pooler_dropout": 0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": model.hidden_size,
        "conv_kernel_size": model.conv_kernel_size,
        "conv_act": "gelu",
        **head_fields(model),
    }


_REQUIRED_FIELDS = {
    "share_att_key": (False, True), "relative_attention": (False, True), "norm_rel_ebd": ("none", "layer_norm"),
    "pooler_hidden_act": ("gelu", "gelu"), "conv_groups": (1, 1), "pooler_dropout": (0, 0),
}  # fmt: skip
"""Required fields of DeBERTa-v2 and -v3: the value if a field is missing, and the supported value."""


def deberta_model(config: Values) -> dict[str, object]:
    """Model fields from config.json; raises UserError for a feature that our models lack."""
    hidden, positions = config.integer("hidden_size"), config.integer("max_position_embeddings", 512)
    kernel = config.integer("conv_kernel_size", 0, minimum=0)
    for name, (default, supported) in _REQUIRED_FIELDS.items():
        value = config.get(name, default)
        if value != supported:
            raise UserError(f"{name} {value!r} cannot be converted; only {supported!r}, as in DeBERTa-v2 and -v3, can")
    if kernel and config.text("conv_act", "tanh") != "gelu":
        raise UserError(f"conv_act {config.text('conv_act', 'tanh')!r} cannot be converted; only gelu can")
    field = config.get("pos_att_type")
    terms = field.lower().split("|") if isinstance(field, str) else config.texts("pos_att_type") if field else []
    if sorted(term.strip() for term in terms) != ["c2p", "p2c"]:
        raise UserError(f"pos_att_type {field!r} cannot be converted; only c2p and p2c together can")
    for name in ("embedding_size", "pooler_hidden_size"):
        if config.integer(name, hidden) != hidden:
            raise UserError(f"{name} {config.integer(name)} is not hidden_size {hidden}; it cannot be converted")
    relative = config.integer("max_relative_positions", -1, minimum=-1)
    learned = config.flag("position_biased_input", True)
    return {
        **read_task_head(config, {"classification": _CLASSIFIER}),
        "model_type": "deberta",
        "num_tokentypes": config.integer("type_vocab_size", 0, minimum=0),
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": config.integer("num_attention_heads"),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "max_relative_positions": relative if relative > 0 else positions,
        "position_buckets": max(config.integer("position_buckets", -1, minimum=-1), 0),
        "position_embedding_type": "learned_absolute" if learned else "none",
        "conv_kernel_size": kernel,
        "norm_epsilon": config.number("layer_norm_eps", 1e-7),
        "bias_gelu_fusion": is_tanh(config, "hidden_act", "gelu"),
        "attention_dropout": config.number("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": config.number("hidden_dropout_prob", 0.1),
    }

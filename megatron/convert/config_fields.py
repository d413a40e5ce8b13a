"""Fields of config.json that several architectures share."""

from __future__ import annotations

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import ModelConfig

DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def gelu_name(model: ModelConfig) -> str:
    """Name of a model's GELU in config.json."""
    return "gelu_new" if model.activation == "gelu_tanh" else "gelu"


def is_tanh(config: Values, name: str, default: str) -> bool:
    """Whether the named GELU is the tanh approximation."""
    activation = config.text(name, default)
    if activation not in (*_TANH_GELU, "gelu"):
        raise UserError(f"{name} {activation!r} cannot be converted; only variants of GELU can")
    return activation != "gelu"

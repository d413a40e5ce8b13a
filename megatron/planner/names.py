"""The pieces of a model, whose costs are added up: the embedding, layers of each kind, and the head."""

from __future__ import annotations

from megatron.config.model import ModelConfig

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
EXPERTS = "experts"
"""First word of a layer with experts, of which there may be several kinds: "experts 8"."""


def piece_of(model: ModelConfig, layer: int) -> str:
    """The name of a layer's piece."""
    count = model.expert_layers.get(layer)
    name = LAYER if count is None else f"{EXPERTS} {count}"
    return f"{name} window" if model.window_attn_skip_freq and model.window_of(layer) is not None else name


def pieces_of(model: ModelConfig) -> tuple[str, ...]:
    """The names of a model's pieces, each once."""
    return (EMBEDDING, *dict.fromkeys(piece_of(model, layer) for layer in range(model.num_layers)), HEAD)


def kind_of(name: str) -> str:
    """The kind of a piece, as corrections name it."""
    return name.split()[0]

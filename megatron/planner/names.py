"""Names of the pieces of a model: the embedding, each kind of layer, and the head."""

from __future__ import annotations

from megatron.config.model import ModelConfig

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
EXPERTS = "experts"
"""First word of the name of a layer with experts, followed by their number: "experts 8"."""


def piece_of(model: ModelConfig, layer: int) -> str:
    """Name of a layer's piece."""
    count = model.expert_layers.get(layer)
    name = LAYER if count is None else f"{EXPERTS} {count}"
    return f"{name} window" if model.window_attn_skip_freq and model.window_of(layer) is not None else name


def pieces_of(model: ModelConfig) -> tuple[str, ...]:
    """Distinct names of a model's pieces."""
    return (EMBEDDING, *dict.fromkeys(piece_of(model, layer) for layer in range(model.num_layers)), HEAD)


def kind_of(name: str) -> str:
    """Kind of a piece, as named in corrections."""
    return name.split()[0]

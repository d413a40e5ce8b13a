"""Activation recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import derived, option


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What is recomputed in backward instead of being kept."""

    recompute_granularity: Literal["full", "selective"] | None = derived(
        "nothing is recomputed",
        "Recompute whole layers (full) or the attention core only (selective).",
        aliases=("activations-checkpoint-granularity",),
    )
    recompute_method: Literal["uniform", "block"] | None = derived(
        "uniform with --recompute-granularity full",
        "Which layers, under full: all in groups (uniform), or the first few of each stage (block).",
    )
    recompute_num_layers: int = option(
        1,
        "Layers in a group (uniform), or layers recomputed in each stage (block).",
        unit="layers",
        minimum=1,
        aliases=("checkpoint-num-layers", "activations-checkpoint-num-layers"),
    )

"""Activation recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activations to recompute in the backward pass instead of storing them."""

    recompute_granularity: Literal["full", "selective"] | None = derived(
        "nothing is recomputed",
        "Recompute whole layers (full) or only the attention core (selective).",
        aliases=("activations-checkpoint-granularity",),
        common="layout",
    )
    recompute_method: Literal["uniform", "block"] | None = derived(
        "uniform with --recompute-granularity full",
        "Layers to recompute with full: all, in groups (uniform), or the first few of each stage (block).",
    )
    recompute_num_layers: int = option(
        1,
        "Layers per group (uniform), or layers to recompute in each stage (block).",
        unit="layers",
        minimum=1,
        aliases=("checkpoint-num-layers", "activations-checkpoint-num-layers"),
    )


def resolve_recompute(recompute: RecomputeConfig) -> RecomputeConfig:
    """Fill the method implied by --recompute-granularity full."""
    if recompute.recompute_granularity == "full" and recompute.recompute_method is None:
        return replace(recompute, recompute_method="uniform")
    return recompute


def check_recompute(recompute: RecomputeConfig, parallel: ParallelConfig, model: ModelConfig) -> None:
    """Check the dependencies of the settings and the number of layers; raise UserError for contradictions."""
    if recompute.recompute_granularity != "full":
        if recompute.recompute_method is not None:
            raise UserError(
                f"--recompute-method {recompute.recompute_method} needs --recompute-granularity full; add it "
                "or leave the method out"
            )
        if recompute.recompute_num_layers != 1:
            raise UserError(
                f"--recompute-num-layers {recompute.recompute_num_layers} needs --recompute-granularity "
                "full; add it or leave the number out"
            )
        return
    chunks, stages = parallel.virtual_pipeline_model_parallel_size or 1, parallel.pipeline_model_parallel_size
    split = parallel.pipeline_model_parallel_split_rank if model.decoder_layers else None
    decoder = len(model.decoder_layers) // (stages - (split or 0))
    layers = max(model.num_layers // (split or stages) // chunks, decoder)
    if recompute.recompute_num_layers > layers:
        raise UserError(
            f"--recompute-num-layers {recompute.recompute_num_layers} is more than the {layers} layers that "
            f"a pipeline stage or chunk holds; choose at most {layers}"
        )

"""Checks of the model's shape."""

from __future__ import annotations

from megatron.config.errors import UserError
from megatron.config.run import RunConfig


def check_model(config: RunConfig) -> None:
    """Raise UserError for a model that cannot be built on any layout."""
    model = config.model
    if model.num_attention_heads % model.num_query_groups != 0:
        raise UserError(
            f"--num-query-groups {model.num_query_groups} does not divide --num-attention-heads "
            f"{model.num_attention_heads}; choose a divisor"
        )
    if model.position_embedding_type == "learned_absolute" and model.seq_length > model.max_position_embeddings:
        raise UserError(
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}; raise the latter to at least the former"
        )
    _check_rotary(config)
    chosen = [
        flag
        for flag, on in (
            ("--swiglu", model.swiglu),
            ("--openai-gelu", model.openai_gelu),
            ("--squared-relu", model.squared_relu),
        )
        if on
    ]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} exclude each other; keep one activation")
    precision = config.precision
    formats = [
        flag for flag, on in (("--fp16", precision.fp16), ("--bf16", precision.bf16), ("--fp64", precision.fp64)) if on
    ]
    if len(formats) > 1:
        raise UserError(f"{' and '.join(formats)} exclude each other; keep one number format")
    if precision.fp64 and config.parallel.accumulate_allreduce_grads_in_fp32:
        raise UserError("--fp64 and --accumulate-allreduce-grads-in-fp32 exclude each other; leave the latter out")
    if precision.loss_scale is not None and not precision.fp16:
        raise UserError("--loss-scale is for --fp16 only; leave it out or add --fp16")
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise UserError(
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
            f"{precision.initial_loss_scale:g}; lower the former"
        )


def _check_rotary(config: RunConfig) -> None:
    model = config.model
    if model.position_embedding_type != "rope":
        if model.rotary_percent != 1.0:
            raise UserError("--rotary-percent needs rotary positions; add --position-embedding-type rope")
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated < 2 or rotated % 2 != 0:
        raise UserError(
            f"--rotary-percent {model.rotary_percent:g} of {model.kv_channels} channels a head "
            f"(--kv-channels) rotates {rotated} channels; choose values that give an even number of at least "
            "2"
        )

"""Checks of the model's shape."""

from __future__ import annotations

import dataclasses

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig
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
    if model.add_qkv_bias and model.add_bias_linear:
        raise UserError(
            "--add-qkv-bias: all linear layers have biases already; leave it out, or add --disable-bias-linear"
        )
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
        given = "--rotary-percent" if model.rotary_percent != 1.0 else "--rotary-scaling"
        if model.rotary_percent != 1.0 or model.rotary_scaling != "none":
            raise UserError(f"{given} needs rotary positions; add --position-embedding-type rope")
    _check_rotary_scaling(model)
    if model.position_embedding_type != "rope":
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated < 2 or rotated % 2 != 0:
        raise UserError(
            f"--rotary-percent {model.rotary_percent:g} of {model.kv_channels} channels a head "
            f"(--kv-channels) rotates {rotated} channels; choose values that give an even number of at least "
            "2"
        )


def _check_rotary_scaling(model: ModelConfig) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(model)}
    of_all, of_llama3 = ("factor",), ("original_length", "low_turns", "high_turns")
    needed = {"none": (), "linear": of_all, "llama3": of_all + of_llama3}[model.rotary_scaling]
    for part in of_all + of_llama3:
        name = f"rotary_scaling_{part}"
        if part not in needed and getattr(model, name) != defaults[name]:
            kind = "llama3" if part in of_llama3 else "linear or llama3"
            raise UserError(f"--{name.replace('_', '-')} is for --rotary-scaling {kind}; add it, or leave this out")
    if model.rotary_scaling == "llama3" and model.rotary_scaling_low_turns >= model.rotary_scaling_high_turns:
        raise UserError(
            f"--rotary-scaling-low-turns {model.rotary_scaling_low_turns:g} is not below --rotary-scaling-high-turns "
            f"{model.rotary_scaling_high_turns:g}; lower the former"
        )


def check_vocabulary(vocab_size: int, multiple: int, tensor: int) -> None:
    """Raise UserError when padding leaves a tensor-parallel rank no entry of the vocabulary.

    Args:
        vocab_size: entries without padding.
        multiple: --make-vocab-size-divisible-by.
        tensor: tensor-parallel ranks.
    """
    if _all_hold_some(vocab_size, multiple, tensor):
        return
    powers = [1 << power for power in range(multiple.bit_length())]
    fitting = [power for power in powers if power < multiple and _all_hold_some(vocab_size, power, tensor)]
    less = f"--make-vocab-size-divisible-by {fitting[-1]}" if fitting else "--tensor-model-parallel-size"
    raise UserError(
        f"a vocabulary of {vocab_size} entries, padded to a multiple of --make-vocab-size-divisible-by {multiple} x "
        f"--tensor-model-parallel-size {tensor}, leaves tensor-parallel rank {tensor - 1} none of them; "
        f"{'use' if fitting else 'lower'} {less}"
    )


def _all_hold_some(vocab_size: int, multiple: int, tensor: int) -> bool:
    rows = -(-vocab_size // (multiple * tensor)) * multiple
    return rows * (tensor - 1) < vocab_size

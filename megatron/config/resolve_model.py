"""Derived sizes of the model."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron.base.errors import UserError
from megatron.base.option import is_unset
from megatron.config.model import ModelConfig


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Fill every derived size. Raises UserError if that is impossible."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if is_unset(model.kv_channels):
        if hidden % heads != 0:
            raise UserError(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; change one of "
                "them, or give the width of a head with --kv-channels"
            )
        model = replace(model, kv_channels=hidden // heads)
    if is_unset(model.ffn_hidden_size):
        width = 8 * hidden // 3 // 64 * 64 if model.gated else 4 * hidden
        if width == 0:
            raise UserError(
                f"--{model.activation}: --hidden-size {hidden} is too small for a default; give --ffn-hidden-size"
            )
        model = replace(model, ffn_hidden_size=width)
    # --window-attn-skip-freq becomes a value per layer, or none if all layers are alike.
    pattern = model.window_attn_skip_freq
    if len(pattern) == 1 and pattern[0] > 1:
        pattern = [int((layer + 1) % pattern[0] != 0) for layer in range(model.num_layers)]
    all_windowed = model.sliding_window is not None and set(pattern) == {1}
    model = replace(model, window_attn_skip_freq=[] if all_windowed else pattern)
    model = fill_rotary_scaling(model)
    if is_unset(model.moe_ffn_hidden_size) and model.has_experts:
        model = replace(model, moe_ffn_hidden_size=model.ffn_hidden_size)
    if is_unset(model.moe_eval_capacity_factor):
        model = replace(model, moe_eval_capacity_factor=model.moe_expert_capacity_factor)
    if is_unset(model.num_query_groups):
        model = replace(model, num_query_groups=heads)
    if is_unset(model.decoder_num_layers) and model.model_type == "t5":
        model = replace(model, decoder_num_layers=model.num_layers)
    if is_unset(model.max_position_embeddings):
        model = replace(model, max_position_embeddings=max(model.seq_length, model.labels_of(0)))
    if is_unset(model.max_relative_positions) and model.shares_distances:
        model = replace(model, max_relative_positions=model.max_position_embeddings)
    if is_unset(model.num_tokentypes):
        model = replace(model, num_tokentypes=2 if model.model_type == "bert" and model.bert_binary_head else 0)
    return model


def fill_rotary_scaling(model: ModelConfig) -> ModelConfig:
    """Fill the rotary scaling factors, which configurations from before YaRN lack."""
    yarn = model.rotary_scaling == "yarn"
    if is_unset(model.rotary_scaling_high_turns):
        model = replace(model, rotary_scaling_high_turns=32.0 if yarn else 4.0)
    if is_unset(model.rotary_scaling_attention_factor):
        factor = 1.0 + 0.1 * math.log(model.rotary_scaling_factor) if yarn else 1.0
        model = replace(model, rotary_scaling_attention_factor=factor)
    return model

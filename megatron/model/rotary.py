"""Rotary position embedding (Su et al. 2021), halves convention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config.model import ModelConfig

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, each (s, b, 1, rotated channels)."""


def rotary_tables(positions: Tensor, model: ModelConfig, dtype: torch.dtype, local: bool = False) -> Tables:
    """Tables of int64 positions (s, b), where b may be 1 for all samples; ``local``: of layers with a window."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    rotary_dim = int(model.kv_channels * model.rotary_percent)
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=precision) / rotary_dim
    if local and model.rope_local_base_freq is not None:
        radii, factor = model.rope_local_base_freq**exponents, 1.0
    else:
        radii, factor = _scale(model.rotary_base**exponents, model), model.rotary_scaling_attention_factor
    angles = positions.to(precision).unsqueeze(-1) / radii
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _scale(radii: Tensor, model: ModelConfig) -> Tensor:
    """Wavelengths over 2 pi, made longer as ``--rotary-scaling`` says.

    Llama 3 and YaRN leave those that turn often within the original length, stretch those that turn seldom, and go from
    one to the other in between: Llama 3 linearly in the frequency, YaRN in the number of the channel.
    """
    if model.rotary_scaling == "none":
        return radii
    if model.rotary_scaling == "linear":
        return radii * model.rotary_scaling_factor
    low, high = model.rotary_scaling_low_turns, model.rotary_scaling_high_turns
    if model.rotary_scaling == "llama3":
        turns = model.rotary_scaling_original_length / (2 * math.pi * radii)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        first, last = (_channel_of(turns, 2 * len(radii), model) for turns in (high, low))
        if model.yarn_correction_range_round_to_int:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(radii) - 1)
        channels = torch.arange(len(radii), device=radii.device, dtype=radii.dtype)
        unscaled = 1 - ((channels - first) / (last - first or 0.001)).clamp(0, 1)
    return radii / (unscaled + (1 - unscaled) / model.rotary_scaling_factor)


def _channel_of(turns: float, rotary_dim: int, model: ModelConfig) -> float:
    """The channel, of half as many as are rotated, whose wavelength turns so often within the original length."""
    radius = model.rotary_scaling_original_length / (2 * math.pi * turns)
    return rotary_dim * math.log(radius) / (2 * math.log(model.rotary_base))


def apply_rotary(x_sbnd: Tensor, tables: Tables) -> Tensor:
    """Rotates the first channels of each head, as many as the tables have."""
    cos, sin = tables
    rotary_dim = cos.shape[-1]
    turned, kept = x_sbnd[..., :rotary_dim], x_sbnd[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned

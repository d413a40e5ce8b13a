"""Rotary position embedding (Su et al. 2021), halves convention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config.model import ModelConfig

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, each (s, b, 1, rotated channels)."""


def rotary_tables(positions: Tensor, model: ModelConfig, dtype: torch.dtype, local: bool = False) -> Tables:
    """Tables for int64 positions (s, b), with b = 1 if all samples share them; ``local``: for sliding-window layers."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    rotary_dim = model.rotary_channels
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=precision) / rotary_dim
    if local and model.rope_local_base_freq is not None:
        radii, factor = model.rope_local_base_freq**exponents, 1.0
    else:
        # Llama 3 and YaRN keep short wavelengths (many turns within the original length), stretch long wavelengths, and
        # interpolate in between: Llama 3 linearly in the frequency, YaRN in the channel index.
        radii = model.rotary_base**exponents
        if model.rotary_scaling == "linear":
            radii = radii * model.rotary_scaling_factor
        elif model.rotary_scaling != "none":
            low, high = model.rotary_scaling_low_turns, model.rotary_scaling_high_turns
            if model.rotary_scaling == "llama3":
                turns = model.rotary_scaling_original_length / (2 * math.pi * radii)
                unscaled = ((turns - low) / (high - low)).clamp(0, 1)
            else:
                # Channel indices, among half the rotated channels, with so many turns within the original length.
                bounds = [model.rotary_scaling_original_length / (2 * math.pi * turns) for turns in (high, low)]
                first, last = (
                    2 * len(radii) * math.log(radius) / (2 * math.log(model.rotary_base)) for radius in bounds
                )
                if model.yarn_correction_range_round_to_int:
                    first, last = math.floor(first), math.ceil(last)
                first, last = max(first, 0), min(last, 2 * len(radii) - 1)
                channels = torch.arange(len(radii), device=radii.device, dtype=radii.dtype)
                unscaled = 1 - ((channels - first) / (last - first or 0.001)).clamp(0, 1)
            radii = radii / (unscaled + (1 - unscaled) / model.rotary_scaling_factor)
        factor = model.rotary_scaling_attention_factor
    angles = positions.to(precision).unsqueeze(-1) / radii
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def apply_rotary(x_sbnd: Tensor, tables: Tables) -> Tensor:
    """Rotate the first channels of each head; the tables determine their number."""
    cos, sin = tables
    rotary_dim = cos.shape[-1]
    rotated, unrotated = x_sbnd[..., :rotary_dim], x_sbnd[..., rotary_dim:]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated

"""Rotary position embedding (Su et al. 2021), halves convention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config.model import ModelConfig


def rotary_tables(positions: Tensor, model: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (s, b, 1, rotated channels), for int64 positions (s, b); b may be 1 for all samples."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    rotary_dim = int(model.kv_channels * model.rotary_percent)
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=precision) / rotary_dim
    angles = positions.to(precision).unsqueeze(-1) / _scaled(model.rotary_base**exponents, model)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scaled(radii: Tensor, model: ModelConfig) -> Tensor:
    """Wavelengths over 2 pi, made longer as ``--rotary-scaling`` says.

    Llama 3 leaves those that turn often within the original length, stretches those that turn seldom, and goes from one
    to the other in between, linearly in the frequency.
    """
    if model.rotary_scaling == "none":
        return radii
    if model.rotary_scaling == "linear":
        return radii * model.rotary_scaling_factor
    turns = model.rotary_scaling_original_length / (2 * math.pi * radii)
    low, high = model.rotary_scaling_low_turns, model.rotary_scaling_high_turns
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return radii / (kept + (1 - kept) / model.rotary_scaling_factor)


def apply_rotary(x_sbnd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first channels of each head, as many as the tables have."""
    cos, sin = tables
    rotary_dim = cos.shape[-1]
    turned, kept = x_sbnd[..., :rotary_dim], x_sbnd[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned

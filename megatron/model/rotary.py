"""Rotary position embedding (Su et al. 2021), halves convention."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (s, b, 1, rotary_dim), for int64 positions (s, b); b may be 1 for all samples."""
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=precision) / rotary_dim
    angles = positions.to(precision).unsqueeze(-1) / base**exponents
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x_sbnd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first ``rotary_dim`` channels of each head."""
    cos, sin = tables
    rotary_dim = cos.shape[-1]
    turned, kept = x_sbnd[..., :rotary_dim], x_sbnd[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned

"""Random tensors that depend on a seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def seeded(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=dtype)

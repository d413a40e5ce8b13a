"""Matrix helpers shared by compressors: random start matrices and matrix shapes."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from megatron.base.seeds import hash_text


def random_bases(k: int, m: int, r: int, seed: int, name: str, like: Tensor) -> Tensor:
    """Gaussian start matrices (k, m, r), equal on all ranks for the same seed and name.

    Args:
        seed: seed of the run's compressors.
        name: name of the matrices; different names give different matrices.
        like: a tensor of the desired dtype and device.

    Returns:
        The matrices; they may be cached and must not be changed.
    """
    # Stateless messages need the same matrix each time, and a copy to a GPU makes the host wait.
    return (_cached_matrix if k == 1 else _drawn)((k, m, r), f"{seed}/{name}", like.device, like.dtype)


def _drawn(shape: tuple[int, int, int], name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(hash_text(name))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)


_cached_matrix = functools.lru_cache(maxsize=32)(_drawn)


def matrix_shape(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Rows and columns of a parameter viewed as a matrix, with all dimensions but the last as rows."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1

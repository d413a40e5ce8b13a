"""The matrix algebra that compressors share: random starts and the shapes of matrices."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor


def random_bases(k: int, m: int, r: int, seed: int, name: str, like: Tensor) -> Tensor:
    """Gaussian start matrices (k, m, r), the same on every rank that asks by the same seed and name.

    Args:
        seed: seed of the run's compressors.
        name: name of the matrices; other names get other matrices.
        like: a tensor of the wanted dtype and device.

    Returns:
        The matrices, which others may be given, too: they must not be changed.
    """
    # Messages that keep no state ask for the same one each time, and a copy to a GPU makes the host wait.
    return (_kept if k == 1 else _drawn)((k, m, r), f"{seed}/{name}", like.device, like.dtype)


def _drawn(shape: tuple[int, int, int], name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)


_kept = functools.lru_cache(maxsize=32)(_drawn)


def matrix_shape(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Rows and columns of a parameter as one matrix: all dimensions but the last are rows."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if shape else 1

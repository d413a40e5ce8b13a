"""The matrix algebra that compressors share: random starts and the shapes of matrices."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def random_bases(k: int, m: int, r: int, seed: int, name: str, like: Tensor) -> Tensor:
    """Gaussian start matrices (k, m, r), the same on every rank that asks by the same seed and name.

    Args:
        seed: seed of the run's compressors.
        name: name of the matrices; other names get other matrices.
        like: a tensor of the wanted dtype and device.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    start = torch.randn((k, m, r), generator=generator, dtype=torch.float32)
    return start.to(device=like.device, dtype=like.dtype)


def matrix_shape(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Rows and columns of a parameter as one matrix: all dimensions but the last are rows."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1] if shape else 1

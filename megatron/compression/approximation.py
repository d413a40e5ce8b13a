"""Tensors in compressed form, which do not take their full memory until written out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.ops import scatter_add_packed


class Approximation(ABC):
    """A tensor in compressed form."""

    @abstractmethod
    def write_to(self, out: Tensor) -> None:
        """Overwrite ``out``, which is contiguous and has the tensor's shape."""

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        """Subtract ``share`` times the tensor from ``x``, in place."""
        dense = torch.empty_like(x)
        self.write_to(dense)
        x.sub_(dense, alpha=share)


@dataclass(frozen=True)
class Factors(Approximation):
    """A stack of k matrices as thin factors, P Q^T: (k, n, r) and (k, m, r)."""

    p_knr: Tensor
    q_kmr: Tensor

    def _matrices(self, x: Tensor) -> Tensor:
        return x.view(self.p_knr.shape[0], self.p_knr.shape[1], self.q_kmr.shape[1])

    def write_to(self, out: Tensor) -> None:
        torch.bmm(self.p_knr, self.q_kmr.transpose(1, 2), out=self._matrices(out))

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        self._matrices(x).baddbmm_(self.p_knr, self.q_kmr.transpose(1, 2), alpha=-share)


@dataclass(frozen=True)
class Sparse(Approximation):
    """Some elements of a flattened tensor, zero elsewhere; pieces that overlap add up.

    Args:
        pieces: ascending, distinct indices (int64), and the values there.
    """

    pieces: Sequence[tuple[Tensor, Tensor]]

    def write_to(self, out: Tensor) -> None:
        flat = out.zero_().view(-1)
        for indices, values in self.pieces:
            scatter_add_packed(flat, indices, values)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        for indices, values in self.pieces:
            scatter_add_packed(x.view(-1), indices, values * -share)


def write(value: Tensor | Approximation, out: Tensor) -> None:
    """Overwrite ``out`` with a tensor or an approximation."""
    if isinstance(value, Approximation):
        value.write_to(out)
    elif value.data_ptr() != out.data_ptr():
        out.copy_(value.view(out.shape))


def subtract(value: Tensor | Approximation, x: Tensor, share: float = 1.0) -> None:
    """Subtract ``share`` times a tensor or an approximation from ``x``, in place."""
    if isinstance(value, Approximation):
        value.subtract_from(x, share)
    else:
        x.sub_(value.view(x.shape), alpha=share)


def dense(value: Tensor | Approximation, like: Tensor) -> Tensor:
    """Convert a tensor or an approximation to a new tensor with the shape and dtype of ``like``."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    write(value, out)
    return out

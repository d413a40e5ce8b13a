"""Operations on the rows of experts that the kernels' benchmark measures."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernel_cases import MICRO_BATCH, MODELS, SEQUENCE, TP, KernelCase, Runs, drawn, kind_of, nbytes
from megatron.kernels import combine, ops


def row_cases(model: str, device: str, quick: bool = False, dtype: torch.dtype = torch.float32) -> Iterator[KernelCase]:
    """Cases of adding up the rows of a micro-batch's tokens, which come from 2 experts each, and of the gradients."""
    size, k = (SEQUENCE * MICRO_BATCH // TP, MODELS[model]), 2

    def drawn_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places_n = torch.randperm(size[0] * k, device=device, generator=torch.Generator(device).manual_seed(7))
        rows_rh = drawn((size[0] * k, size[1]), device, dtype)
        return rows_rh, places_n.view(-1, k), drawn((size[0], k), device), drawn(size, device, dtype)

    def add_up() -> Runs:
        rows_rh, places_tk, weights_tk, out_th = drawn_rows()
        given = nbytes(rows_rh, places_tk, weights_tk)
        return Runs(
            lambda: ops.combine_rows(rows_rh, places_tk, weights_tk, out_th),
            lambda: combine.combine_rows(rows_rh, places_tk, weights_tk, out_th),
            nbytes(rows_rh), given + nbytes(out_th),
        )  # fmt: skip

    def back() -> Runs:
        rows_rh, places_tk, weights_tk, grad_th = drawn_rows()
        given = nbytes(grad_th, rows_rh, places_tk, weights_tk)
        return Runs(
            lambda: ops.combine_rows_back(grad_th, rows_rh, places_tk, weights_tk),
            lambda: combine.combine_rows_back(grad_th, rows_rh, places_tk, weights_tk),
            nbytes(rows_rh), given + nbytes(rows_rh, weights_tk),
        )  # fmt: skip

    shape, setting = f"{size[0]} x {size[1]}", f"{k} rows a token{kind_of(dtype)}"
    yield KernelCase("combine_rows", model, shape, setting, add_up)
    yield KernelCase("combine_rows_back", model, shape, setting, back)

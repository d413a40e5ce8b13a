"""Kernels for the rest of the package: compiled kernels if they were built, else pure-torch reference implementations.

``reference`` defines their results. Both give the same bits unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels import combine, float8, native, reference
from megatron.kernels import tiles as tiled
from megatron.kernels.grid import Grid, GridKind, Role
from megatron.kernels.tiles import TiledMessage, Tiles


def quantize_pack(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    grid: Grid,
    role: Role = Role.PLAIN,
    other: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """See ``reference.quantize_pack``."""
    if native.serves(x, other, scales):
        second = _none(x) if other is None else other
        native.operators().quantize_pack(x, second, codes, scales, role, *_numbers(grid), seed is not None, seed or 0)
    else:
        reference.quantize_pack(x, other, codes, scales, grid, role, seed)


def unpack_dequantize(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    grid: Grid,
    role: Role = Role.PLAIN,
    other: Tensor | None = None,
) -> None:
    """See ``reference.unpack_dequantize``."""
    if native.serves(codes, scales, other, out):
        second = _none(out) if other is None else other
        native.operators().unpack_dequantize(codes, scales, second, out, role, *_numbers(grid))
    else:
        reference.unpack_dequantize(codes, scales, other, out, grid, role)


def _numbers(grid: Grid) -> tuple[int, int, int, int, int, int]:
    return grid.bits, grid.layout, grid.group, grid.kind, grid.method, grid.rotation


def quantize_tiles(
    x: Tensor,
    message: TiledMessage,
    tiles: Tiles,
    role: Role = Role.PLAIN,
    other: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """See ``tiles.quantize_tiles``."""
    if not native.serves(x, other, *message.scales):
        tiled.quantize_tiles(x, other, message, tiles, role, seed)
        return
    second, seeds = _none(x) if other is None else other, tiles.seeds(seed)
    block, ratio = (tiles.outliers.block, tiles.outliers.ratio) if tiles.outliers else (0, 0.0)
    if mixture := tiles.mixture:
        error_1t = torch.empty((1, mixture.tiles), device=x.device)
        bits, _, *low_numbers = _numbers(mixture.low)
        native.operators().tile_errors(
            x, second, message.rotated, error_1t.view(-1), role, bits, *low_numbers, block, ratio, mixture.tile
        )
        native.operators().mark_tiles(abs_topk(error_1t, mixture.extended_tiles).view(-1), message.marked)
        ratio = 0.0  # the bitmap of blocks is already written
    native.operators().quantize_tiles(
        x, second, *_streams(message), role, *_numbers(tiles.grid), block, ratio, *_wide(tiles), seed is not None,
        seeds[-1] or 0, seeds[0] or 0,
    )  # fmt: skip


def dequantize_tiles(message: TiledMessage, out: Tensor, tiles: Tiles, role: Role = Role.PLAIN) -> None:
    """See ``tiles.dequantize_tiles``."""
    if not native.serves(*message.scales, *message.codes, out):
        tiled.dequantize_tiles(message, out, tiles, role)
        return
    block = tiles.outliers.block if tiles.outliers else 0
    native.operators().dequantize_tiles(*_streams(message), out, role, *_numbers(tiles.grid), block, *_wide(tiles))


def _streams(message: TiledMessage) -> tuple[Tensor, ...]:
    """Codes and scales of most tiles, codes and scales of tiles with an extra bit, and the bitmaps."""
    codes, scales = message.codes, message.scales
    wide = (codes[0], scales[0]) if len(codes) > 1 else (_none(codes[0]), _none(scales[0]))
    return codes[-1], scales[-1], *wide, message.rotated, message.marked


def _wide(tiles: Tiles) -> tuple[int, int, int]:
    """Kind of the grid with an extra bit, tile size, and number of tiles with an extra bit; zeros without a mixture."""
    mixture = tiles.mixture
    return (mixture.high.kind, mixture.tile, mixture.extended_tiles) if mixture else (GridKind.SYMMETRIC, 0, 0)


def float8_encode(x: Tensor, codes: Tensor, scales: Tensor, form: float8.Float8, seed: int | None = None) -> None:
    """See ``float8.float8_encode``."""
    if native.serves(x, scales):
        stochastic = seed is not None
        native.operators().float8_encode(x, codes, scales, form.mantissa, form.group, stochastic, seed or 0)
    else:
        float8.float8_encode(x, codes, scales, form, seed)


def float8_decode(codes: Tensor, scales: Tensor, out: Tensor, form: float8.Float8, added: int = 0) -> None:
    """See ``float8.float8_decode``."""
    if native.serves(codes, scales, out):
        native.operators().float8_decode(codes, scales, out, form.mantissa, form.group, added)
    else:
        float8.float8_decode(codes, scales, out, form, added)


def _none(like: Tensor) -> Tensor:
    """Placeholder for an absent tensor argument of an operator."""
    return like.new_empty(0)


def abs_topk(x_kn: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest magnitudes in each row, (k, count), int64, ascending; see ``reference``."""
    indices_kc = torch.empty((x_kn.shape[0], min(count, x_kn.shape[1])), dtype=torch.int64, device=x_kn.device)
    if native.serves(x_kn) and x_kn.dtype == torch.float32:
        native.operators().abs_topk(x_kn.contiguous(), indices_kc)
    else:
        reference.abs_topk(x_kn, indices_kc)
    return indices_kc


def dilate(mask_kn: Tensor, radius: int) -> Tensor:
    """Dilate a mask: True if the same row has a True within ``radius`` positions."""
    out_kn = torch.empty_like(mask_kn)
    if native.serves(mask_kn):
        native.operators().dilate(mask_kn, radius, out_kn)
    else:
        reference.dilate(mask_kn, radius, out_kn)
    return out_kn


def gather_packed(x_n: Tensor, indices_c: Tensor) -> Tensor:
    """Gather the elements at ascending indices of a flat tensor."""
    packed_c = torch.empty(indices_c.shape, dtype=x_n.dtype, device=x_n.device)
    if native.serves(x_n) and x_n.dtype == torch.float32:
        native.operators().gather_packed(x_n, indices_c, packed_c)
    else:
        reference.gather_packed(x_n, indices_c, packed_c)
    return packed_c


def scatter_add_packed(x_n: Tensor, indices_c: Tensor, packed_c: Tensor) -> None:
    """Add packed numbers at ascending, distinct indices of a flat tensor, in place."""
    if native.serves(x_n, packed_c) and x_n.dtype == torch.float32:
        native.operators().scatter_add_packed(x_n, indices_c, packed_c)
    else:
        reference.scatter_add_packed(x_n, indices_c, packed_c)


def pack_bits(codes_n: Tensor, bits: int, packed: Tensor) -> None:
    """Pack codes into the bytes of ``packed``; see ``reference.pack_bits``."""
    packed.copy_(reference.pack_bits(codes_n, bits))


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first ``count`` codes, uint8; see ``reference.pack_bits``."""
    return reference.unpack_bits(packed, bits, count)


def finite_norm(x: Tensor) -> Tensor:
    """(sum of squares, 1 if all are finite else 0), fp64, in a single pass."""
    out_2 = torch.empty(2, dtype=torch.float64, device=x.device)
    if native.serves(x):
        native.operators().finite_norm(x.contiguous(), out_2)
    else:
        reference.finite_norm(x, out_2)
    return out_2


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Sum of squares of all elements, in fp64; inf or nan if any element is. Synchronizes the device once.

    Flat tensors that are adjacent in memory, such as views of a buffer, are read in a single pass.
    """
    return float(torch.stack([finite_norm(x)[0] for x in _joined(tensors)]).sum()) if tensors else 0.0


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Merge flat tensors that are adjacent in memory."""
    runs: list[list[Tensor]] = []
    for x in tensors:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.dim() == x.dim() == 1
            and last.dtype == x.dtype
            and x.storage_offset() == last.storage_offset() + last.numel()
            and last.untyped_storage()._cdata == x.untyped_storage()._cdata
            and last.is_contiguous()
            and x.is_contiguous()
        ):
            runs[-1].append(x)
        else:
            runs.append([x])
    return [run[0] if len(run) == 1 else run[0].as_strided((sum(x.numel() for x in run),), (1,)) for run in runs]


def sample_histogram(x: Tensor, stride: int, bins: int) -> tuple[Tensor, Tensor]:
    """Histogram counts (bins, int64) and range (low, high; fp64) of the finite elements among every ``stride``-th."""
    counts_b = torch.empty(bins, dtype=torch.int64, device=x.device)
    range_2 = torch.empty(2, dtype=torch.float64, device=x.device)
    if native.serves(x):
        native.operators().sample_histogram(x.contiguous(), stride, counts_b, range_2)
    else:
        reference.sample_histogram(x, stride, counts_b, range_2)
    return counts_b, range_2


def orthonormalize(x_knr: Tensor) -> Tensor:
    """Orthonormal bases of the columns of a stack of matrices.

    Uses Cholesky-QR in fp64, and Gram-Schmidt with a second pass if columns are dependent: the result is orthonormal
    for inputs of any rank, while plain Gram-Schmidt would divide rounding noise by itself. Equal inputs give equal
    outputs for any number of threads, so ranks that hold the same sum agree.

    Args:
        x_knr: k matrices, n >= r. Half precision is computed in fp32.

    Returns:
        (k, n, r), fp32 or fp64; NaN where the input is not finite.
    """
    wide = x_knr if x_knr.dtype == torch.float64 else x_knr.float()
    q_knr = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    if native.serves(wide):
        native.operators().orthonormalize(wide.contiguous(), q_knr)
    else:
        reference.orthonormalize(wide, q_knr)
    return q_knr


def cross_entropy(
    logits_tv: Tensor,
    labels_t: Tensor,
    valid: int,
    lse_t: Tensor,
    target_t: Tensor | None = None,
    weights_t: Tensor | None = None,
) -> None:
    """See ``reference.cross_entropy``."""
    if native.serves(logits_tv, lse_t, target_t, weights_t):
        native.operators().cross_entropy(logits_tv, labels_t, valid, lse_t, target_t, weights_t)
    else:
        reference.cross_entropy(logits_tv, labels_t, valid, lse_t, target_t, weights_t)


def combine_rows(rows_rh: Tensor, places_tk: Tensor, weights_tk: Tensor | None, out_th: Tensor) -> None:
    """See ``combine.combine_rows``."""
    if native.serves(rows_rh, weights_tk, out_th):
        weights_tk = None if weights_tk is None else weights_tk.float().contiguous()
        native.operators().combine_rows(rows_rh.contiguous(), places_tk, weights_tk, out_th)
    else:
        combine.combine_rows(rows_rh, places_tk, weights_tk, out_th)


def combine_rows_back(grad_th: Tensor, rows_rh: Tensor, places_tk: Tensor, weights_tk: Tensor) -> tuple[Tensor, Tensor]:
    """See ``combine.combine_rows_back``."""
    if not native.serves(grad_th, rows_rh, weights_tk):
        return combine.combine_rows_back(grad_th, rows_rh, places_tk, weights_tk)
    rows_rh, weights_tk = rows_rh.contiguous(), weights_tk.float().contiguous()
    grad_rh, grad_tk = torch.empty_like(rows_rh), torch.empty_like(weights_tk)
    native.operators().combine_rows_back(grad_th.contiguous(), rows_rh, places_tk, weights_tk, grad_rh, grad_tk)
    return grad_rh, grad_tk

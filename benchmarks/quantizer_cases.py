"""Quantizers that the kernels' benchmark measures: grids, 8-bit floating point, and tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cases import (
    BITS,
    MICRO_BATCH,
    MODELS,
    SEQUENCE,
    TP,
    BuiltCase,
    KernelCase,
    Size,
    draw_normal,
    dtype_text,
    nbytes,
)
from megatron.compression.tiles import make_mixture, map_bytes
from megatron.kernels import float8, ops, reference
from megatron.kernels import tiles as tiles_reference
from megatron.kernels.float8 import Float8
from megatron.kernels.grid import Grid, GridKind, Role, ScaleLayout
from megatron.kernels.tiles import Outliers, TiledMessage, Tiles

OUTLIERS = Outliers(64, 2.0)
FRACTION = 3.8


def codec_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of quantizers on activations."""
    hidden = MODELS[model]
    size = (SEQUENCE * MICRO_BATCH // TP, hidden)
    for bits in BITS:
        yield from grid_cases(model, size, bits, device)
        if not quick:
            yield from scale_cases(
                model, size, f"{bits} bits, channel", Grid(bits, ScaleLayout.CHANNEL, hidden), device
            )
            yield from scale_cases(model, size, f"{bits} bits, tensor", Grid(bits, ScaleLayout.TENSOR), device)
    yield from float8_cases(model, size, device, plain=quick)


def _message(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    codes = torch.empty(grid.code_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(grid.scale_count(x.numel()), device=x.device)


def _encode(x: Tensor, grid: Grid, role: Role = Role.PLAIN, seed: int | None = None) -> BuiltCase:
    codes, scales = _message(x, grid)
    other = None if role is Role.PLAIN else torch.zeros_like(x)
    in_place = 0 if other is None else 2 * nbytes(other)
    return BuiltCase(
        lambda: ops.quantize_pack(x, codes, scales, grid, role, other, seed),
        lambda: reference.quantize_pack(x, other, codes, scales, grid, role, seed),
        nbytes(x), nbytes(x, codes, scales) + in_place, in_place,
    )  # fmt: skip


def _decode(x: Tensor, grid: Grid, role: Role = Role.PLAIN) -> BuiltCase:
    codes, scales = _message(x, grid)
    ops.quantize_pack(x, codes, scales, grid)
    out = torch.zeros_like(x)
    in_place = 2 * nbytes(out) if role is Role.ADD else 0
    return BuiltCase(
        lambda: ops.unpack_dequantize(codes, scales, out, grid, role),
        lambda: reference.unpack_dequantize(codes, scales, None, out, grid, role),
        nbytes(x), nbytes(codes, scales) + (in_place or nbytes(out)), in_place,
    )  # fmt: skip


def scale_cases(
    model: str, size: Size, setting: str, grid: Grid, device: str, dtype: torch.dtype = torch.float32
) -> Iterator[KernelCase]:
    """Cases of quantizing to a grid, and back."""
    shape = f"{size[0]} x {size[1]}"
    yield KernelCase("quantize", model, shape, setting, lambda: _encode(draw_normal(size, device, dtype), grid))
    yield KernelCase("dequantize", model, shape, setting, lambda: _decode(draw_normal(size, device, dtype), grid))


def grid_cases(
    model: str, size: Size, bits: int, device: str, dtype: torch.dtype = torch.float32, *, plain: bool = False
) -> Iterator[KernelCase]:
    """Cases of group scales; ``plain`` leaves out deltas, feedback and sums."""
    grid, shape, setting = Grid(bits), f"{size[0]} x {size[1]}", f"{bits} bits{dtype_text(dtype)}, group"
    yield from scale_cases(model, size, setting, grid, device, dtype)
    if plain:
        return

    def case(op: str, build: Callable[[Tensor], BuiltCase]) -> KernelCase:
        return KernelCase(op, model, shape, setting, lambda: build(draw_normal(size, device, dtype)))

    yield case("quantize, delta", lambda x: _encode(x, grid, Role.DELTA))
    yield case("quantize, feedback", lambda x: _encode(x, grid, Role.FEEDBACK))
    if dtype == torch.float32:
        yield case("dequantize, add", lambda x: _decode(x, grid, Role.ADD))
    if bits == 4:
        yield case("quantize, stochastic", lambda x: _encode(x, grid, seed=7))
        rotated = dataclasses.replace(grid, rotation=64)
        yield case("quantize, rotated", lambda x: _encode(x, rotated))


def float8_cases(
    model: str, size: Size, device: str, dtype: torch.dtype = torch.float32, *, plain: bool = False
) -> Iterator[KernelCase]:
    """Cases of both formats with scales of tiles; unless ``plain``, also of other scales, and of sums."""
    groups = {"tile": 128, "row": size[1], "tensor": size[0] * size[1]}
    formats = [("e4m3", 3, "tile"), ("e5m2", 2, "tile")]
    if not plain:
        formats += [("e4m3", 3, "row"), ("e4m3", 3, "tensor")]
    for name, mantissa, scale in formats:

        def case(
            op: str, build: partial[BuiltCase], setting: str = f"{name}{dtype_text(dtype)}, {scale}"
        ) -> KernelCase:
            return KernelCase(
                op, model, f"{size[0]} x {size[1]}", setting, lambda: build(draw_normal(size, device, dtype))
            )  # fmt: skip

        form = Float8(mantissa, groups[scale])
        yield case("quantize", partial(_encode_float8, form=form))
        yield case("dequantize", partial(_decode_float8, form=form))
        if not plain and scale == "tile" and dtype == torch.float32:
            yield case("dequantize, add", partial(_decode_float8, form=form, added=1))
            yield case("quantize, stochastic", partial(_encode_float8, form=form, seed=7))


def _float8_message(x: Tensor, form: Float8) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(form.scale_count(x.numel()), device=x.device)


def _encode_float8(x: Tensor, form: Float8, seed: int | None = None) -> BuiltCase:
    codes, scales = _float8_message(x, form)
    return BuiltCase(
        lambda: ops.float8_encode(x, codes, scales, form, seed),
        lambda: float8.float8_encode(x, codes, scales, form, seed), nbytes(x), nbytes(x, codes, scales),
    )  # fmt: skip


def _decode_float8(x: Tensor, form: Float8, added: int = 0) -> BuiltCase:
    codes, scales = _float8_message(x, form)
    ops.float8_encode(x, codes, scales, form)
    out = torch.zeros_like(x)
    in_place = 2 * nbytes(out) if added else 0
    return BuiltCase(
        lambda: ops.float8_decode(codes, scales, out, form, added),
        lambda: float8.float8_decode(codes, scales, out, form, added),
        nbytes(x), nbytes(codes, scales) + (in_place or nbytes(out)), in_place,
    )  # fmt: skip


def tile_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of quantizers with limits, rotations or widths by tile, on activations with an outlier in 1,000 numbers."""
    size = (SEQUENCE * MICRO_BATCH // TP, MODELS[model])
    for bits in (4,) if quick else (2, 4, 8):
        yield from scale_cases(model, size, f"{bits} bits minmax, group", Grid(bits, kind=GridKind.MINMAX), device)
    count, low = size[0] * size[1], Grid(int(FRACTION), kind=GridKind.SIGNED)
    mixed_widths = make_mixture(low, Grid(low.bits + 1), low.group, FRACTION, count)
    tiles_by_setting = {
        "4 bits outliers, group": Tiles(Grid(4), count, OUTLIERS),
        f"{FRACTION} bits, group": Tiles(low, count, mixture=mixed_widths),
    }
    for setting, tiles in tiles_by_setting.items():

        def case(
            op: str, build: Callable[[Tensor, Tiles], BuiltCase], setting: str = setting, tiles: Tiles = tiles
        ) -> KernelCase:
            return KernelCase(
                op, model, f"{size[0]} x {size[1]}", setting, lambda: build(_with_outliers(size, device), tiles)
            )

        yield case("quantize", _encode_tiles)
        yield case("dequantize", _decode_tiles)
        if not quick:
            yield case("quantize, feedback", partial(_encode_tiles, role=Role.FEEDBACK))
            yield case("dequantize, add", partial(_decode_tiles, role=Role.ADD))


def _with_outliers(size: tuple[int, int], device: str) -> Tensor:
    x = draw_normal(size, device)
    x.view(-1)[::1000] *= 20.0
    return x


def _tile_message(tiles: Tiles, device: torch.device) -> TiledMessage:
    def empty_bytes(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    return TiledMessage(
        [torch.empty(grid.scale_count(count), device=device) for grid, count in tiles.streams],
        [empty_bytes(grid.code_bytes(count)) for grid, count in tiles.streams],
        *(empty_bytes(map_bytes(bits)) for bits in tiles.maps),
    )


def _tile_bytes(message: TiledMessage) -> int:
    return nbytes(*message.scales, *message.codes, message.rotated, message.marked)


def _encode_tiles(x: Tensor, tiles: Tiles, role: Role = Role.PLAIN) -> BuiltCase:
    message = _tile_message(tiles, x.device)
    other = None if role is Role.PLAIN else torch.zeros_like(x)
    in_place = 0 if other is None else 2 * nbytes(other)
    # The tiles with an additional bit are known after all were read, so they are read again.
    read_again = nbytes(x) + in_place // 2 if tiles.mixture else 0
    return BuiltCase(
        lambda: ops.quantize_tiles(x, message, tiles, role, other),
        lambda: tiles_reference.quantize_tiles(x, other, message, tiles, role, None),
        nbytes(x), nbytes(x) + read_again + _tile_bytes(message) + in_place, in_place,
    )  # fmt: skip


def _decode_tiles(x: Tensor, tiles: Tiles, role: Role = Role.PLAIN) -> BuiltCase:
    message, out = _tile_message(tiles, x.device), torch.zeros_like(x)
    ops.quantize_tiles(x, message, tiles)
    in_place = 2 * nbytes(out) if role is Role.ADD else 0
    return BuiltCase(
        lambda: ops.dequantize_tiles(message, out, tiles, role),
        lambda: tiles_reference.dequantize_tiles(message, out, tiles, role),
        nbytes(x), _tile_bytes(message) + (in_place or nbytes(out)), in_place,
    )  # fmt: skip

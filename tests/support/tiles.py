"""Checks of kernels that decide tile by tile, on any device: equality with the reference, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron.compression.tiles import make_mixture, map_bytes
from megatron.kernels import native, ops, reference
from megatron.kernels import tiles as twins
from megatron.kernels.grid import Grid, GridKind, Role, ScaleLayout, ScaleMethod
from megatron.kernels.tiles import Outliers, TiledMessage, Tiles
from tests.support.combinations import in_third
from tests.support.kernels import DTYPES, noise, same, spoil


def numbers(count: int, seed: int, device: str) -> Tensor:
    """Normal numbers of several sizes, with outliers."""
    x = noise((count,), seed, "cpu")
    x *= 2.0 ** (torch.arange(count) // 40 % 5 - 2)
    x[3::97] *= 30.0
    return x.to(device)


def blank(tiles: Tiles, scale: torch.dtype, device: str) -> TiledMessage:
    """A message that holds something else."""
    scales = [torch.full((grid.scale_count(count),), 7, dtype=scale, device=device) for grid, count in tiles.streams]
    code_sizes = [grid.code_bytes(count) for grid, count in tiles.streams]
    codes, maps = ([torch.full((size,), 77, dtype=torch.uint8, device=device) for size in sizes]
                   for sizes in (code_sizes, map(map_bytes, tiles.maps)))  # fmt: skip
    return TiledMessage(scales, codes, *maps)


def tensors_of(message: TiledMessage) -> list[Tensor]:
    return [message.rotated, message.marked, *message.scales, *message.codes]


def check(x: Tensor, other: Tensor | None, tiles: Tiles, role: Role, seed: int | None, scale: torch.dtype) -> bool:
    """Maps, scales, codes, the second tensor and decoded values equal those of the reference.

    Returns:
        Whether all were compared: scales that take a sum may have another last digit, and then another grid.
    """
    device = x.device.type
    message, expected = (blank(tiles, scale, device) for _ in range(2))
    moved, wanted_moved = (None if other is None else other.clone() for _ in range(2))
    ops.quantize_tiles(x, message, tiles, role, moved, seed)
    twins.quantize_tiles(x, wanted_moved, expected, tiles, role, seed)
    assert torch.equal(message.rotated, expected.rotated)
    if any(grid.sums for grid, _ in tiles.streams):
        scales_differ = any(not same(a, b) for a, b in zip(message.scales, expected.scales, strict=True))
        if scales_differ or not torch.equal(message.marked, expected.marked):
            return False
    assert torch.equal(message.marked, expected.marked)
    for a, b in zip(tensors_of(message), tensors_of(expected), strict=True):
        assert same(a, b)
    if moved is not None and wanted_moved is not None:
        assert same(moved, wanted_moved)
    check_decoding(message, tiles, x.dtype)
    return True


def check_decoding(message: TiledMessage, tiles: Tiles, dtype: torch.dtype) -> None:
    for role, kind in ((Role.PLAIN, dtype), (Role.ADD, torch.float32)):
        out = noise((tiles.count,), 5, message.rotated.device.type).to(kind)
        expected = out.clone()
        ops.dequantize_tiles(message, out, tiles, role)
        twins.dequantize_tiles(message, expected, tiles, role)
        assert same(out, expected)


def _mixed(grid: Grid, count: int, outliers: Outliers | None = None, wide: GridKind | None = None) -> Iterator[Tiles]:
    """Half a bit more than the grid has, where there are enough tiles."""
    high = replace(grid, bits=grid.bits + 1, kind=grid.kind if wide is None else wide)
    mixed = make_mixture(grid, high, max(grid.group, grid.rotation), grid.bits + 0.5, grid.coded(count))
    if mixed:
        yield Tiles(grid, count, outliers, mixed)


def tilings(count: int) -> Iterator[Tiles]:
    """Blocks and tiles of every size, alone and together, at several widths and kinds of grid."""
    for block in (8, 16, 64, 256, 512, 1024):
        outliers = Outliers(block, 1.5)
        for group in (8, 64, 256, 2048):
            yield Tiles(Grid(4, group=group, kind=GridKind.MINMAX), count, outliers)
            yield from _mixed(Grid(2, group=group, kind=GridKind.ASYMMETRIC), count, outliers)
        yield Tiles(Grid(5, ScaleLayout.TENSOR), count, outliers)
        yield Tiles(Grid(2, kind=GridKind.SIGNED), count, outliers)
    for group in (8, 24, 64, 72, 256, 1032, 2048):
        yield from _mixed(Grid(3, group=group), count)
        yield from _mixed(Grid(5, group=group, kind=GridKind.MINMAX), count)
        yield from _mixed(Grid(3, group=group, kind=GridKind.SIGNED), count, wide=GridKind.SYMMETRIC)
    for rotation in (8, 64, 256, 512, 1024):
        for group in (8, 64, 256, 2048):
            yield from _mixed(Grid(7, group=group, rotation=rotation), count)
            yield from _mixed(Grid(2, group=group, kind=GridKind.MIDRISE, rotation=rotation), count)
    yield from _mixed(Grid(1, group=64), count)
    yield from _mixed(Grid(4, group=64, method=ScaleMethod.L2), count)


def check_tilings(device: str, counts: tuple[int, ...], role: Role, third: int | None = None) -> None:
    """All tilings or a third, over types of numbers, of second tensors and of scales; nearest and stochastic."""
    compared = number = cases = 0
    for count in counts:
        for tiles in tilings(count):
            number += 1
            if not in_third(number, third):
                continue
            cases += 1
            x = numbers(count, number, device)
            x = (spoil(x, number) if number % 3 == 0 else x).to(DTYPES[number % 3])
            other = None if role is Role.PLAIN else noise((count,), number + 1, device, DTYPES[number % 2])
            scale = torch.bfloat16 if number % 2 else torch.float32
            compared += check(x, other, tiles, role, number if number % 5 == 0 else None, scale)
    assert compared > 0.7 * cases


def check_errors(device: str) -> None:
    """The errors by which tiles are chosen: of large tiles, and of numbers that lose nothing or are not finite."""
    for tile in (8, 24, 64, 256, 264, 2048, 2056, 4104, 6152):
        grid = Grid(3, group=tile)
        x = numbers(3 * tile + 5, tile, device)
        x[tile : 2 * tile] = 0.0
        expected = twins.tile_errors(x, grid, tile)
        errors = torch.full_like(expected, 7.0)
        none = torch.empty(0, dtype=torch.uint8, device=device)
        numbers_of = (grid.bits, grid.group, grid.kind, grid.method, 0, 0, 0.0, tile)
        native.operators().tile_errors(x, x.new_empty(0), none, errors, Role.PLAIN, *numbers_of)
        assert torch.equal(errors, expected)
        assert errors[1] == 0
        assert errors[0] > 0


def check_any_map(device: str) -> None:
    """A map with more or fewer marks than there is room for is read as its twin reads it, inside the message."""
    for count in (1000, 40_000):
        for tiles in _mixed(Grid(3), count):
            assert tiles.mixture is not None
            message = blank(tiles, torch.float32, device)
            ops.quantize_tiles(numbers(count, 1, device), message, tiles)
            for bits in (0, 255, 0b10110):
                message.marked.fill_(bits)
                check_decoding(message, tiles, torch.float32)


def check_many_tiles(device: str) -> None:
    """More tiles than a block of threads counts the marks of."""
    for tiles in _mixed(Grid(3, group=8), 72_005):
        assert check(numbers(72_005, 2, device), None, tiles, Role.PLAIN, None, torch.float32)


def check_marks(device: str) -> None:
    for count in (1, 8, 77, 9000):
        for share in (1, 2, 7):
            indices = torch.arange(0, count, share, device=device)
            marks = torch.full((map_bytes(count),), 77, dtype=torch.uint8, device=device)
            native.operators().mark_tiles(indices, marks)
            bits = reference.unpack_bits(marks, 1, count)
            assert torch.equal(bits.nonzero().view(-1), indices)

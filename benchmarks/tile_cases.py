"""What the kernels' benchmark measures of limits of groups, rotations of outliers and fractions of a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cases import MICRO_BATCH, MODELS, SEQUENCE, TP, KernelCase, Runs, drawn, nbytes, scale_cases
from megatron.compression.tiles import map_bytes, mixture
from megatron.kernels import ops
from megatron.kernels import tiles as twins
from megatron.kernels.grid import Grid, GridKind, Role
from megatron.kernels.tiles import Outliers, TiledMessage, Tiles

OUTLIERS = Outliers(64, 2.0)
FRACTION = 3.8


def tile_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of quantizers on activations of which one number in 1,000 is an outlier."""
    size = (SEQUENCE * MICRO_BATCH // TP, MODELS[model])
    for bits in (4,) if quick else (2, 4, 8):
        yield from scale_cases(model, size, f"{bits} bits minmax, group", Grid(bits, kind=GridKind.MINMAX), device)
    count, low = size[0] * size[1], Grid(int(FRACTION), kind=GridKind.SIGNED)
    mixed = mixture(low, Grid(low.bits + 1), low.group, FRACTION, count)
    kinds = {
        "4 bits outliers, group": Tiles(Grid(4), count, OUTLIERS),
        f"{FRACTION} bits, group": Tiles(low, count, mixture=mixed),
    }
    for setting, tiles in kinds.items():

        def case(
            op: str, build: Callable[[Tensor, Tiles], Runs], setting: str = setting, tiles: Tiles = tiles
        ) -> KernelCase:
            return KernelCase(
                op, model, f"{size[0]} x {size[1]}", setting, lambda: build(_with_outliers(size, device), tiles)
            )

        yield case("quantize", _encode)
        yield case("dequantize", _decode)
        if not quick:
            yield case("quantize, feedback", partial(_encode, role=Role.FEEDBACK))
            yield case("dequantize, add", partial(_decode, role=Role.ADD))


def _with_outliers(size: tuple[int, int], device: str) -> Tensor:
    x = drawn(size, device)
    x.view(-1)[::1000] *= 20.0
    return x


def _message(tiles: Tiles, device: torch.device) -> TiledMessage:
    def bytes_of(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    return TiledMessage(
        [torch.empty(grid.scale_count(count), device=device) for grid, count in tiles.streams],
        [bytes_of(grid.code_bytes(count)) for grid, count in tiles.streams],
        *(bytes_of(map_bytes(bits)) for bits in tiles.maps),
    )


def _bytes(message: TiledMessage) -> int:
    return nbytes(*message.scales, *message.codes, message.rotated, message.marked)


def _encode(x: Tensor, tiles: Tiles, role: Role = Role.PLAIN) -> Runs:
    message = _message(tiles, x.device)
    other = None if role is Role.PLAIN else torch.zeros_like(x)
    moved = 0 if other is None else 2 * nbytes(other)
    # Which tiles get one more bit is known when all were read: they are read once more.
    again = nbytes(x) + moved // 2 if tiles.mixture else 0
    return Runs(
        lambda: ops.quantize_tiles(x, message, tiles, role, other),
        lambda: twins.quantize_tiles(x, other, message, tiles, role, None),
        nbytes(x), nbytes(x) + again + _bytes(message) + moved, moved,
    )  # fmt: skip


def _decode(x: Tensor, tiles: Tiles, role: Role = Role.PLAIN) -> Runs:
    message, out = _message(tiles, x.device), torch.zeros_like(x)
    ops.quantize_tiles(x, message, tiles)
    moved = 2 * nbytes(out) if role is Role.ADD else 0
    return Runs(
        lambda: ops.dequantize_tiles(message, out, tiles, role),
        lambda: twins.dequantize_tiles(message, out, tiles, role),
        nbytes(x), _bytes(message) + (moved or nbytes(out)), moved,
    )  # fmt: skip

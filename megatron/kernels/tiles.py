"""Per-tile decisions of quantized messages: kernel parameters, and pure-torch reference implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels import reference
from megatron.kernels.grid import Grid, Role

_SEEDS = (1 << 63) - 1


@dataclass(frozen=True)
class Outliers:
    """Rule to rotate only blocks with an outlier, which benefit from a rotation. A short last block is never rotated.

    Args:
        block: size of a block, a power of two.
        ratio: ratio of largest to second-largest magnitude above which a block is rotated.
    """

    block: int
    ratio: float

    def blocks(self, count: int) -> int:
        """Number of whole blocks in ``count`` numbers."""
        return count // self.block

    def find(self, x_n: Tensor) -> Tensor:
        """Mask of the blocks to rotate, bool; False for nonfinite blocks."""
        blocks = self.blocks(x_n.numel())
        x_kb = x_n[: blocks * self.block].view(blocks, self.block)
        if not blocks:
            return torch.zeros(0, dtype=torch.bool, device=x_n.device)
        first_k, second_k = x_kb.abs().topk(2, dim=1).values.unbind(dim=1)
        return (first_k > second_k * self.ratio) & first_k.isfinite()

    def rotate(self, x_n: Tensor, found_k: Tensor) -> Tensor:
        """Rotate the blocks in the mask; the rotation is its own inverse."""
        size = found_k.numel() * self.block
        if not size:
            return x_n
        x_kb = x_n[:size].view(-1, self.block)
        rotated_kb = reference.rotate(x_n[:size], self.block).view(-1, self.block)
        return torch.cat([torch.where(found_k.unsqueeze(1), rotated_kb, x_kb).view(-1), x_n[size:]])


@dataclass(frozen=True)
class Mixture:
    """Tiles of two bit widths: tiles with the largest errors get an extra bit, but never a short last tile.

    Args:
        low: grid of most tiles.
        high: grid of the tiles with an extra bit.
        tile: size of a tile.
        count: number of values, including the padding of a rotation's last block.
        extended_tiles: number of tiles with an extra bit.
    """

    low: Grid
    high: Grid
    tile: int
    count: int
    extended_tiles: int

    @property
    def tiles(self) -> int:
        """Number of whole tiles."""
        return self.count // self.tile

    @property
    def streams(self) -> tuple[tuple[Grid, int], ...]:
        """Grids and element counts of the two streams of a message."""
        high = self.extended_tiles * self.tile
        return (self.high, high), (self.low, self.count - high)

    def split(self, x_n: Tensor, marked_t: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the marked tiles, and all other numbers."""
        x_tn, size = x_n[: self.tiles * self.tile].view(-1, self.tile), self.extended_tiles * self.tile
        sorted_n = x_tn[self._order(marked_t)].view(-1)
        return sorted_n[:size], torch.cat([sorted_n[size:], x_n[self.tiles * self.tile :]])

    def join(self, marked_n: Tensor, others_n: Tensor, marked_t: Tensor) -> Tensor:
        """Inverse of ``split``."""
        others_size = (self.tiles - self.extended_tiles) * self.tile
        sorted_tn = torch.cat([marked_n, others_n[:others_size]]).view(-1, self.tile)
        x_tn = torch.empty_like(sorted_tn).index_copy_(0, self._order(marked_t), sorted_tn)
        return torch.cat([x_tn.view(-1), others_n[others_size:]])

    @staticmethod
    def _order(marked_t: Tensor) -> Tensor:
        """Tile indices, marked tiles first, each in ascending order."""
        return marked_t.to(torch.uint8).sort(descending=True, stable=True).indices


@dataclass(frozen=True)
class Tiles:
    """Encoding of numbers with per-tile decisions.

    Args:
        grid: the grid of all tiles, or of most tiles with a mixture; if it has a rotation, all blocks are rotated.
        count: number of elements.
        outliers: rule to rotate only some blocks; only if the grid has no rotation.
        mixture: tiles with an extra bit.
    """

    grid: Grid
    count: int
    outliers: Outliers | None = None
    mixture: Mixture | None = None

    @property
    def streams(self) -> tuple[tuple[Grid, int], ...]:
        """Grids and element counts of the streams of a message."""
        return self.mixture.streams if self.mixture else ((self.grid, self.count),)

    @property
    def maps(self) -> tuple[int, int]:
        """Sizes in bits of the two bitmaps: rotated blocks, and tiles with an extra bit."""
        blocks = self.outliers.blocks(self.count) if self.outliers else 0
        return blocks, self.mixture.tiles if self.mixture else 0

    def seeds(self, seed: int | None) -> list[int | None]:
        """Seeds of the streams' noise."""
        return [None if seed is None else (seed + i) & _SEEDS for i in range(len(self.streams))]


@dataclass(frozen=True)
class TiledMessage:
    """Sections of a message.

    Args:
        scales, codes: scales and codes of each stream, in the order of ``Tiles.streams``.
        rotated: bitmap of the rotated blocks, uint8, in the format of ``reference.pack_bits``.
        marked: bitmap of the tiles with an extra bit.
    """

    scales: Sequence[Tensor]
    codes: Sequence[Tensor]
    rotated: Tensor
    marked: Tensor


def tile_errors(x_n: Tensor, low: Grid, tile: int) -> Tensor:
    """Squared error of each whole tile with rounding to nearest, in fp32.

    Errors are computed on the rotated numbers, with fp32 scales. Squares are added pairwise, in the same order on every
    device, so that all devices choose the same tiles, unless a scale depends on a sum.

    Args:
        x_n: flat numbers, padded to whole blocks of the rotation.
        low: the grid.
        tile: size of a tile.
    """
    tiles = x_n.numel() // tile
    turned_n = reference.rotate(x_n, low.rotation) if low.rotation else x_n
    left_n, plain = torch.zeros_like(turned_n), Grid(low.bits, low.layout, low.group, low.kind, low.method)
    codes = torch.empty(plain.code_bytes(x_n.numel()), dtype=torch.uint8, device=x_n.device)
    scales = torch.empty(plain.scale_count(x_n.numel()), device=x_n.device)
    reference.quantize_pack(turned_n, left_n, codes, scales, plain, Role.FEEDBACK, None)
    sum_tn = left_n[: tiles * tile].view(tiles, tile).square()
    while sum_tn.shape[1] > 1:
        sum_tn = torch.nn.functional.pad(sum_tn, (0, sum_tn.shape[1] % 2))
        sum_tn = sum_tn[:, ::2] + sum_tn[:, 1::2]
    return sum_tn.view(-1)


def mark_tiles(indices: Tensor, map_b: Tensor) -> None:
    """Write a bitmap with the bits at ascending indices set."""
    bits_t = torch.zeros(map_b.numel() * 8, dtype=torch.uint8, device=map_b.device)
    map_b.copy_(reference.pack_bits(bits_t.index_fill_(0, indices, 1), 1))


def quantize_tiles(
    x: Tensor, other: Tensor | None, message: TiledMessage, tiles: Tiles, role: Role, seed: int | None
) -> None:
    """Quantize numbers with per-tile decisions; see ``reference.quantize_pack``, ``Outliers`` and ``Mixture``.

    Args:
        x: contiguous, any shape.
        other: the reference (``Role.DELTA``) or the residual (``Role.FEEDBACK``), of the same size; updated in place.
        message: output message.
        tiles: the encoding.
        role: encode x (PLAIN), x - other (DELTA), or x + other (FEEDBACK).
        seed: seed of stochastic rounding; None rounds to nearest.
    """
    input_n = x.reshape(-1).float()
    if role is not Role.PLAIN and other is not None:
        other_n = other.reshape(-1).float()
        input_n = input_n - other_n if role is Role.DELTA else input_n + other_n
    source_n = input_n
    if tiles.outliers:
        found_k = tiles.outliers.find(source_n)
        message.rotated.copy_(reference.pack_bits(found_k, 1))
        source_n = tiles.outliers.rotate(source_n, found_k)
    sources = [source_n]
    if tiles.mixture:
        # The tiles that get an extra bit are chosen and marked.
        x_n = torch.nn.functional.pad(source_n, (0, tiles.mixture.count - source_n.numel()))
        chosen_1c = torch.empty((1, tiles.mixture.extended_tiles), dtype=torch.int64, device=x_n.device)
        reference.abs_topk(tile_errors(x_n, tiles.mixture.low, tiles.mixture.tile).view(1, -1), chosen_1c)
        mark_tiles(chosen_1c.view(-1), message.marked)
        sources = list(tiles.mixture.split(x_n, reference.unpack_bits(message.marked, 1, tiles.mixture.tiles) > 0))
    for i, stream_seed in enumerate(tiles.seeds(seed)):
        grid = tiles.streams[i][0]
        reference.quantize_pack(sources[i], None, message.codes[i], message.scales[i], grid, Role.PLAIN, stream_seed)
    if role is Role.PLAIN or other is None:
        return
    decoded_n = _values(message, tiles)
    moved_n = other_n + decoded_n if role is Role.DELTA else input_n - decoded_n
    other.copy_(moved_n.view(other.shape))


def dequantize_tiles(message: TiledMessage, out: Tensor, tiles: Tiles, role: Role) -> None:
    """Decode numbers encoded by ``quantize_tiles``.

    Args:
        message: output of ``quantize_tiles``.
        out: output, overwritten, or added to in fp32 with ``Role.ADD``.
        tiles: the encoder's encoding.
        role: PLAIN or ADD.
    """
    values_n = _values(message, tiles)
    if role is Role.ADD:
        out.add_(values_n.view(out.shape))
    else:
        out.copy_(values_n.view(out.shape))


def _values(message: TiledMessage, tiles: Tiles) -> Tensor:
    """Decode the numbers of a message, flat."""
    values = [torch.empty(count, device=message.rotated.device) for _, count in tiles.streams]
    for i, value_n in enumerate(values):
        grid = tiles.streams[i][0]
        reference.unpack_dequantize(message.codes[i], message.scales[i], None, value_n, grid, Role.PLAIN)
    x_n, (blocks, marked) = values[0], tiles.maps
    if tiles.mixture:
        x_n = tiles.mixture.join(values[0], values[1], reference.unpack_bits(message.marked, 1, marked) > 0)
    if tiles.outliers:
        x_n = tiles.outliers.rotate(x_n, reference.unpack_bits(message.rotated, 1, blocks) > 0)
    return x_n[: tiles.count]

"""What a quantized message decides tile by tile: which blocks it rotates, and which tiles get one more bit.

Each decision is a map of one bit a tile on the wire. How many tiles get more bits follows from the shape, and so does
the length of a message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.kernels import reference
from megatron.kernels.grid import Grid, Role
from megatron.kernels.ops import abs_topk, quantize_pack


def map_bytes(count: int) -> int:
    """Bytes of a map of ``count`` tiles."""
    return -(-count // 8)


@dataclass(frozen=True)
class Outliers:
    """The blocks that a rotation helps: those whose largest magnitude stands out. The last one is none if it is short.

    Args:
        block: numbers of a block, a power of two.
        ratio: largest over second-largest magnitude above which a block is rotated.
    """

    block: int
    ratio: float

    def blocks(self, count: int) -> int:
        """Whole blocks among ``count`` numbers."""
        return count // self.block

    def find(self, x_n: Tensor) -> Tensor:
        """Which blocks of flat numbers are rotated, bool; none that is not finite is."""
        blocks = self.blocks(x_n.numel())
        x_kb = x_n[: blocks * self.block].view(blocks, self.block)
        if not blocks:
            return torch.zeros(0, dtype=torch.bool, device=x_n.device)
        first_k, second_k = x_kb.abs().topk(2, dim=1).values.unbind(dim=1)
        return (first_k > second_k * self.ratio) & first_k.isfinite()

    def rotate(self, x_n: Tensor, found_k: Tensor) -> Tensor:
        """Rotates these blocks, or rotates them back."""
        size = found_k.numel() * self.block
        if not size:
            return x_n
        x_kb = x_n[:size].view(-1, self.block)
        rotated_kb = reference.rotate(x_n[:size], self.block).view(-1, self.block)
        return torch.cat([torch.where(found_k.unsqueeze(1), rotated_kb, x_kb).view(-1), x_n[size:]])


@dataclass(frozen=True)
class Mixture:
    """Tiles of two widths: those with the greatest error have one more bit. The last one has not if it is short.

    Args:
        low: grid of most tiles.
        high: grid of the tiles with one more bit.
        tile: numbers of a tile.
        count: all numbers.
        more: how many tiles have one more bit.
    """

    low: Grid
    high: Grid
    tile: int
    count: int
    more: int

    @property
    def tiles(self) -> int:
        """Whole tiles."""
        return self.count // self.tile

    @property
    def streams(self) -> tuple[tuple[Grid, int], ...]:
        """Grids and numbers of the two parts of a message."""
        high = self.more * self.tile
        return (self.high, high), (self.low, self.count - high)

    def choose(self, x_n: Tensor) -> Tensor:
        """Which tiles get one more bit, bool: those that lose most at fewer."""
        x_n = x_n[: self.tiles * self.tile].contiguous()
        left_n = torch.zeros_like(x_n)
        codes = torch.empty(self.low.code_bytes(x_n.numel()), dtype=torch.uint8, device=x_n.device)
        scales = torch.empty(self.low.scale_count(x_n.numel()), device=x_n.device)
        quantize_pack(x_n, codes, scales, self.low, Role.FEEDBACK, left_n)
        error_1t = left_n.view(1, self.tiles, self.tile).square().sum(dim=2)
        chosen_t = torch.zeros(self.tiles, dtype=torch.bool, device=x_n.device)
        return chosen_t.index_fill_(0, abs_topk(error_1t, self.more).view(-1), True)

    def split(self, x_n: Tensor, chosen_t: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of the chosen tiles, and all others."""
        x_tn, size = x_n[: self.tiles * self.tile].view(-1, self.tile), self.more * self.tile
        sorted_n = x_tn[self._order(chosen_t)].view(-1)
        return sorted_n[:size], torch.cat([sorted_n[size:], x_n[self.tiles * self.tile :]])

    def join(self, chosen_n: Tensor, others_n: Tensor, chosen_t: Tensor) -> Tensor:
        """The inverse of ``split``."""
        rest = (self.tiles - self.more) * self.tile
        sorted_tn = torch.cat([chosen_n, others_n[:rest]]).view(-1, self.tile)
        x_tn = torch.empty_like(sorted_tn).index_copy_(0, self._order(chosen_t), sorted_tn)
        return torch.cat([x_tn.view(-1), others_n[rest:]])

    @staticmethod
    def _order(chosen_t: Tensor) -> Tensor:
        """The chosen tiles, then the others, each in the order of their places."""
        return chosen_t.to(torch.uint8).sort(descending=True, stable=True).indices


def mixture(low: Grid, high: Grid, tile: int, bits: float, count: int) -> Mixture | None:
    """As many tiles of more bits as codes and map have room for in ``bits`` bits a number; None if that is none.

    Args:
        count: all numbers, with those that fill up the last block of a rotation.
    """
    whole = Mixture(low, high, tile, count, 0)
    budget = int(bits * (-(-low.coded(count) // 8)))
    spare = budget - map_bytes(whole.tiles) - low.code_bytes(count)
    more = min(spare // (tile // 8), whole.tiles)
    return replace(whole, more=more) if more > 0 else None

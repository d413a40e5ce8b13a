"""Number of tiles with an extra bit in a quantized message, and sizes of the per-tile bitmaps.

Each per-tile decision is a bitmap on the wire. The number of tiles with an extra bit, and thus the length of the
message, depends only on the shape. ``megatron/kernels/tiles.py`` selects these tiles.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.kernels.grid import Grid
from megatron.kernels.tiles import Mixture


def map_bytes(count: int) -> int:
    """Size in bytes of a bitmap of ``count`` tiles."""
    return -(-count // 8)


def make_mixture(low: Grid, high: Grid, tile: int, bits: float, count: int) -> Mixture | None:
    """Mixture with the most extra-bit tiles that fit, with the bitmap, in ``bits`` bits per number; None if none fits.

    Args:
        count: number of values, including the padding of a rotation's last block.
    """
    without_extra = Mixture(low, high, tile, count, 0)
    budget = int(bits * (-(-low.coded(count) // 8)))
    spare = budget - map_bytes(without_extra.tiles) - low.code_bytes(count)
    extra_tiles = min(spare // (tile // 8), without_extra.tiles)
    return replace(without_extra, extended_tiles=extra_tiles) if extra_tiles > 0 else None

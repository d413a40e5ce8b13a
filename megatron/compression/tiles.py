"""How many tiles of a quantized message get one more bit, and the maps of what it decides tile by tile.

Each decision is a map of one bit a tile on the wire. How many tiles get more bits follows from the shape, and so does
the length of a message. ``megatron/kernels/tiles.py`` says which they are.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.kernels.grid import Grid
from megatron.kernels.tiles import Mixture


def map_bytes(count: int) -> int:
    """Bytes of a map of ``count`` tiles."""
    return -(-count // 8)


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

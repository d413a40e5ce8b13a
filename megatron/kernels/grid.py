"""Parameters of the quantizing kernels: grids, scales and roles."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class ScaleLayout(enum.IntEnum):
    """The numbers that share a scale."""

    GROUP = 0
    """Groups of ``group`` consecutive numbers."""
    CHANNEL = 1
    """Numbers at the same index of the last dimension."""
    TENSOR = 2
    """All numbers of the tensor."""


class ScaleMethod(enum.IntEnum):
    """The definition of a scale."""

    MAX = 0
    """The largest magnitude; with one symmetric bit the mean one.

    For mid-rise and signed grids, to nearest, a multiple of the root mean square where that is less; but a number that
    stands out sets the scale of a signed grid. With stochastic rounding, what makes their levels hold every number."""
    L2 = 1
    """Twice the root mean square."""


class GridKind(enum.IntEnum):
    """The levels of a grid of 2**bits codes."""

    SYMMETRIC = 0
    """k/(2^(b-1) - 1) of the scale, both peaks representable; one code is not used. 1 bit: the sign."""
    ASYMMETRIC = 1
    """k/2^(b-1), whose positive peak is clipped."""
    MIDRISE = 2
    """(k + 1/2)/2^(b-1): every code is used, and zero is none of the levels."""
    MINMAX = 3
    """2^b levels from the least number to the greatest. Both are on the wire, as two scales."""
    SIGNED = 4
    """The asymmetric levels of a scale with a sign: level -1 is the largest number, wherever that lies."""


class Role(enum.IntEnum):
    """The role of a quantizer's second tensor, or of a dequantizer's output."""

    PLAIN = 0
    """None; the numbers are written."""
    DELTA = 1
    """Encodes the difference to a reference, which moves to what the receiver then holds."""
    FEEDBACK = 2
    """Encodes the sum with a residual, which becomes what was not sent."""
    ADD = 3
    """Adds the numbers to what is there, in fp32."""


MIDRISE_RMS = (1.5958, 1.9914, 2.3441, 2.6816, 3.0102, 3.33, 3.6395, 3.9376)
"""Scales of mid-rise grids of 1 to 8 bits with the least error on normal numbers, in root mean squares."""

SIGNED_RMS = (math.inf, 2.1, 2.5, math.inf, math.inf, math.inf, math.inf, math.inf)
"""The same of signed grids; from 4 bits on the largest magnitude is about as good."""

STANDS_OUT = 4.0
"""A number stands out if it is larger than so many root mean squares of the others of its group."""


@dataclass(frozen=True)
class Grid:
    """A uniform grid of 2**bits levels for each scale.

    Args:
        bits: 1 to 8.
        layout: the numbers that share a scale.
        group: numbers of a group, a multiple of 8; the number of channels with ``ScaleLayout.CHANNEL``.
        kind: the levels.
        method: the definition of a scale; not of a ``GridKind.MINMAX``.
        rotation: block of a Walsh-Hadamard rotation before quantizing, a power of two from 8 to 1024 that spreads
            outliers over the block; 0 for none. Not with channels.
    """

    bits: int
    layout: ScaleLayout = ScaleLayout.GROUP
    group: int = 64
    kind: GridKind = GridKind.SYMMETRIC
    method: ScaleMethod = ScaleMethod.MAX
    rotation: int = 0

    @property
    def is_sign(self) -> bool:
        """One bit that only tells the sign."""
        return self.bits == 1 and self.kind is GridKind.SYMMETRIC

    @property
    def sums(self) -> bool:
        """Whether a scale takes a sum, whose last digit may differ between implementations."""
        if self.kind is GridKind.MINMAX:
            return False
        return self.method is ScaleMethod.L2 or self.is_sign or self.kind in (GridKind.MIDRISE, GridKind.SIGNED)

    @property
    def top(self) -> int:
        """Steps from zero to the scale; of a minmax grid, from its least level to its greatest."""
        if self.kind is GridKind.MINMAX:
            return (1 << self.bits) - 1
        return (1 << (self.bits - 1)) - (self.kind is GridKind.SYMMETRIC)

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest level, in steps; half a step less than those of a mid-rise grid."""
        if self.kind is GridKind.MINMAX:
            return 0, self.top
        return (-self.top, self.top) if self.kind is GridKind.SYMMETRIC else (-self.top, self.top - 1)

    @property
    def offset(self) -> int:
        """The code of level 0."""
        return 0 if self.kind is GridKind.MINMAX else 1 << (self.bits - 1)

    @property
    def shift(self) -> float:
        """Steps that the levels lie above whole ones."""
        return 0.5 if self.kind is GridKind.MIDRISE else 0.0

    @property
    def scale_size(self) -> int:
        """Numbers on the wire for each scale: the least and the greatest of a minmax grid."""
        return 2 if self.kind is GridKind.MINMAX else 1

    def coded(self, count: int) -> int:
        """Numbers that are encoded for ``count``: a rotation fills its last block up."""
        return -(-count // self.rotation) * self.rotation if self.rotation else count

    def code_bytes(self, count: int) -> int:
        """Bytes of the codes of ``count`` numbers."""
        return -(-self.coded(count) // 8) * self.bits

    def scale_count(self, count: int) -> int:
        """Numbers on the wire for the scales of ``count`` numbers."""
        return self.groups(count) * self.scale_size

    def groups(self, count: int) -> int:
        """Sets of numbers that share a scale, among ``count``."""
        if self.layout is ScaleLayout.CHANNEL:
            return self.group
        return 1 if self.layout is ScaleLayout.TENSOR else -(-self.coded(count) // self.group)

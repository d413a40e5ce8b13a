"""Parameters of the quantizing kernels: grids, scales and roles."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class ScaleLayout(enum.IntEnum):
    """Numbers that share a scale."""

    GROUP = 0
    """Groups of ``group`` consecutive numbers."""
    CHANNEL = 1
    """Numbers at the same index of the last dimension."""
    TENSOR = 2
    """All numbers of the tensor."""


class ScaleMethod(enum.IntEnum):
    """Definition of a scale."""

    MAX = 0
    """The largest magnitude; the mean magnitude for 1-bit symmetric grids.

    For mid-rise and signed grids with rounding to nearest, a multiple of the root mean square if that is smaller,
    except that an outlier sets the scale of a signed grid. With stochastic rounding, the smallest scale whose levels
    cover every number."""
    L2 = 1
    """Twice the root mean square."""


class GridKind(enum.IntEnum):
    """Levels of a grid of 2**bits codes."""

    SYMMETRIC = 0
    """k/(2^(b-1) - 1) of the scale, both peaks representable; a single code is unused. 1 bit: the sign."""
    ASYMMETRIC = 1
    """k/2^(b-1) of the scale; the positive peak is clipped."""
    MIDRISE = 2
    """(k + 1/2)/2^(b-1) of the scale: every code is used, and zero is not a level."""
    MINMAX = 3
    """2^b levels from the minimum to the maximum, which are both sent, as two scales."""
    SIGNED = 4
    """Asymmetric levels with a signed scale: level -1 is the number with the largest magnitude."""


class Role(enum.IntEnum):
    """Role of a quantizer's second tensor, or of a dequantizer's output."""

    PLAIN = 0
    """No second tensor; the output is overwritten."""
    DELTA = 1
    """Encode the difference from a reference, and update the reference to the receiver's new value."""
    FEEDBACK = 2
    """Encode the sum with a residual, and store the quantization error in the residual."""
    ADD = 3
    """Add to the output, in fp32."""


MIDRISE_RMS = (1.5958, 1.9914, 2.3441, 2.6816, 3.0102, 3.33, 3.6395, 3.9376)
"""Optimal scales of mid-rise grids of 1 to 8 bits for Gaussian numbers, in root mean squares."""

SIGNED_RMS = (math.inf, 2.1, 2.5, math.inf, math.inf, math.inf, math.inf, math.inf)
"""Optimal scales of signed grids; from 4 bits on, the largest magnitude is about as good."""

STANDS_OUT = 4.0
"""A number is an outlier if it exceeds this many root mean squares of the other numbers in its group."""


@dataclass(frozen=True)
class Grid:
    """Uniform grid of 2**bits levels for each scale.

    Args:
        bits: 1 to 8.
        layout: numbers that share a scale.
        group: size of a group, a multiple of 8; the number of channels with ``ScaleLayout.CHANNEL``.
        kind: the levels.
        method: definition of a scale; ignored with ``GridKind.MINMAX``.
        rotation: block size of a Walsh-Hadamard rotation before quantizing, a power of two from 8 to 1024, which
            spreads outliers over the block; 0 for none. Not with channels.
    """

    bits: int
    layout: ScaleLayout = ScaleLayout.GROUP
    group: int = 64
    kind: GridKind = GridKind.SYMMETRIC
    method: ScaleMethod = ScaleMethod.MAX
    rotation: int = 0

    @property
    def is_sign(self) -> bool:
        """Whether the code is a single sign bit."""
        return self.bits == 1 and self.kind is GridKind.SYMMETRIC

    @property
    def sums(self) -> bool:
        """Whether a scale depends on a sum, whose last digit may differ between implementations."""
        if self.kind is GridKind.MINMAX:
            return False
        return self.method is ScaleMethod.L2 or self.is_sign or self.kind in (GridKind.MIDRISE, GridKind.SIGNED)

    @property
    def top(self) -> int:
        """Number of steps from zero to the scale; for a minmax grid, from its lowest to its highest level."""
        if self.kind is GridKind.MINMAX:
            return (1 << self.bits) - 1
        return (1 << (self.bits - 1)) - (self.kind is GridKind.SYMMETRIC)

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and highest level, in steps; for a mid-rise grid, the levels minus half a step."""
        if self.kind is GridKind.MINMAX:
            return 0, self.top
        return (-self.top, self.top) if self.kind is GridKind.SYMMETRIC else (-self.top, self.top - 1)

    @property
    def offset(self) -> int:
        """Code of level 0."""
        return 0 if self.kind is GridKind.MINMAX else 1 << (self.bits - 1)

    @property
    def shift(self) -> float:
        """Offset of the levels from whole steps."""
        return 0.5 if self.kind is GridKind.MIDRISE else 0.0

    def coded(self, count: int) -> int:
        """Numbers encoded for ``count`` numbers: a rotation pads its last block."""
        return -(-count // self.rotation) * self.rotation if self.rotation else count

    def code_bytes(self, count: int) -> int:
        """Size in bytes of the codes of ``count`` numbers."""
        return -(-self.coded(count) // 8) * self.bits

    def scale_count(self, count: int) -> int:
        """Numbers on the wire for the scales of ``count`` numbers; a minmax grid sends minimum and maximum."""
        return self.groups(count) * (2 if self.kind is GridKind.MINMAX else 1)

    def groups(self, count: int) -> int:
        """Number of groups that share a scale, among ``count`` numbers."""
        if self.layout is ScaleLayout.CHANNEL:
            return self.group
        return 1 if self.layout is ScaleLayout.TENSOR else -(-self.coded(count) // self.group)

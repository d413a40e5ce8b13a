"""Parameters of the quantizing kernels: grids, scales and roles."""

from __future__ import annotations

import enum
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
    """The largest magnitude; with one symmetric bit the mean one."""
    L2 = 1
    """Twice the root mean square."""


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


@dataclass(frozen=True)
class Grid:
    """A uniform grid of 2**bits levels for each scale.

    Args:
        bits: 1 to 8.
        layout: the numbers that share a scale.
        group: numbers of a group, a multiple of 8; the number of channels with ``ScaleLayout.CHANNEL``.
        symmetric: levels k/(2^(b-1) - 1), both peaks representable (1 bit: the sign); else k/2^(b-1), whose positive
            peak is clipped.
        method: the definition of a scale.
        rotation: block of a Walsh-Hadamard rotation before quantizing, a power of two from 8 to 1024 that spreads
            outliers over the block; 0 for none. Not with channels.
    """

    bits: int
    layout: ScaleLayout = ScaleLayout.GROUP
    group: int = 64
    symmetric: bool = True
    method: ScaleMethod = ScaleMethod.MAX
    rotation: int = 0

    @property
    def is_sign(self) -> bool:
        """One bit that only tells the sign."""
        return self.bits == 1 and self.symmetric

    @property
    def top(self) -> int:
        """The level that the scale itself has."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric else 1 << (self.bits - 1)

    @property
    def offset(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)

    def coded(self, count: int) -> int:
        """Numbers that are encoded for ``count``: a rotation fills its last block up."""
        return -(-count // self.rotation) * self.rotation if self.rotation else count

    def code_bytes(self, count: int) -> int:
        """Bytes of the codes of ``count`` numbers."""
        return -(-self.coded(count) // 8) * self.bits

    def scale_count(self, count: int) -> int:
        """Scales of ``count`` numbers."""
        if self.layout is ScaleLayout.CHANNEL:
            return self.group
        return 1 if self.layout is ScaleLayout.TENSOR else -(-self.coded(count) // self.group)

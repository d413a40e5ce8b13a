"""Elias-Fano code of ascending positions: its length does not depend on the positions, and is close to optimal.

A position is split into its low bits, which are sent unchanged, and its high bits, the bucket. The buckets of a row
ascend, so they are sent in unary: a 1 bit for every position, preceded by a 0 bit for every bucket advanced since the
previous position. With 2^l positions in a bucket, k positions up to n take k l + k + floor(n / 2^l) bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops import pack_bits, unpack_bits


@dataclass(frozen=True)
class SortedPlaces:
    """Code of rows of ascending positions.

    Args:
        rows: number of rows.
        count: positions per row, in ascending order; repeats are allowed.
        largest: largest possible position, below 2**16 + 1.
    """

    rows: int
    count: int
    largest: int

    @cached_property
    def low_bits(self) -> int:
        """Number of low bits, chosen for the shortest code; the largest number of several with the same length."""
        return min(reversed(range(17)), key=lambda low: self.count * low + self._unary_bits(low))

    def _unary_bits(self, low: int) -> int:
        """Bits of a row's buckets; 0 for a single bucket."""
        buckets = self.largest >> low
        return self.count + buckets if buckets else 0

    @cached_property
    def unary_bits(self) -> int:
        """Bits of a row's buckets."""
        return self._unary_bits(self.low_bits)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the message's sections: buckets of all rows; low bits above the lowest 8; the lowest 8 bits.

        Low bits are packed 8 by 8."""
        octets = -(-self.rows * self.count // 8)
        return -(-self.rows * self.unary_bits // 8), octets * max(self.low_bits - 8, 0), octets * min(self.low_bits, 8)

    def encode(self, places_rc: Tensor, sections: Sequence[Tensor]) -> None:
        """Write the sections of the message, uint8, with ``sizes`` bytes."""
        unary, high, low = sections
        if unary.numel():
            rows_r1 = torch.arange(self.rows, device=places_rc.device).unsqueeze(1) * self.unary_bits
            bit_rc = rows_r1 + torch.arange(self.count, device=places_rc.device)
            bit_rc += places_rc >> self.low_bits
            unary_flags = torch.zeros(self.rows * self.unary_bits, dtype=torch.uint8, device=places_rc.device)
            pack_bits(unary_flags.index_fill_(0, bit_rc.view(-1), 1), 1, unary)
        low_values = places_rc.reshape(-1) & ((1 << self.low_bits) - 1)
        if high.numel():
            pack_bits((low_values >> 8).to(torch.uint8), self.low_bits - 8, high)
        if low.numel():
            pack_bits((low_values & 0xFF).to(torch.uint8), min(self.low_bits, 8), low)

    def decode(self, sections: Sequence[Tensor]) -> Tensor:
        """Decode the positions of a message, (rows, count), int32."""
        unary, high, low = sections
        total, device = self.rows * self.count, low.device
        if unary.numel():
            places_rc = _find_set_bits(unary, total).view(self.rows, self.count)
            places_rc -= torch.arange(self.rows, dtype=torch.int32, device=device).unsqueeze(1) * self.unary_bits
            places_rc -= torch.arange(self.count, dtype=torch.int32, device=device)
            places_rc <<= self.low_bits
        else:
            places_rc = torch.zeros(self.rows, self.count, dtype=torch.int32, device=device)
        if low.numel():
            places_rc += unpack_bits(low, min(self.low_bits, 8), total).view_as(places_rc)
        if high.numel():
            places_rc += unpack_bits(high, self.low_bits - 8, total).view_as(places_rc).to(torch.int32) << 8
        return places_rc.clamp_(0, self.largest)  # a corrupt message cannot give positions out of range


def _find_set_bits(packed: Tensor, total: int) -> Tensor:
    """Positions of the ``total`` 1 bits among packed bits, ascending, int32."""
    kind: dict[str, Any] = {"dtype": torch.int32, "device": packed.device}
    bits_v8 = torch.arange(256, **kind).unsqueeze(1) >> torch.arange(8, **kind) & 1
    # For each byte value, positions of its 1 bits, then of its 0 bits.
    places_v8 = bits_v8.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    values_b = packed.to(torch.int32)
    ends_b = bits_v8.sum(dim=1, dtype=torch.int32).index_select(0, values_b).cumsum(0, dtype=torch.int32)
    ends_b.clamp_(max=total)[-1] = total  # also in a corrupt message with more or fewer 1 bits
    counts_b = ends_b.diff(prepend=ends_b.new_zeros(1))
    bytes_n = torch.repeat_interleave(counts_b, output_size=total)
    # The 1 bit with number i overall is number i - (1 bits in previous bytes) in its byte.
    first_b = values_b * 8 - (ends_b - counts_b)
    within_n = first_b.index_select(0, bytes_n).add_(torch.arange(total, **kind)).clamp_(0, places_v8.numel() - 1)
    return bytes_n.mul_(8).add_(places_v8.view(-1).index_select(0, within_n))

"""Chunked Top-K: the largest numbers of every short chunk, with short indices and values of a few bits.

SparseLoCo (arXiv 2508.15706), as Covenant-72B used it: 64 of each 4,096 numbers, 12 bits for the place of each in its
chunk and 2 for its value, 0.219 bits for each number of the tensor.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.api import Aggregate, Op, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.approximation import Approximation
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.message import ScaledCodes
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState
from megatron.kernels.ops import abs_topk, gather_packed, pack_bits, unpack_bits

SIGMAS = 6.0
"""Standard deviations that the bins of the values span together, around their mean."""

_DTYPES = {16: torch.bfloat16, 32: torch.float32}
"""Values without bins. Not fp16: gradients without the loss scale are below its range."""


@dataclass(frozen=True)
class ChunkedTopKConfig:
    """The largest numbers of every chunk, with short indices and values of a few bits."""

    chunk: int = opt(4096, "consecutive numbers of a parameter that are a chunk", minimum=2, maximum=1 << 16)
    k: int = opt(64, "numbers of each chunk that are sent", minimum=1, scheduled=True)
    bits: int = opt(
        2, "bits of a value: 1, 2, 4 or 8 name a bin, whose mean is sent once for a parameter; 16 is bf16, 32 fp32"
    )
    merge: Literal["ranks", "senders"] = opt(
        "ranks", "a place's sum, or as many times the mean over the ranks that sent it as there are ranks"
    )
    decay: float = opt(1.0, "factor of the residual at every step", above=0, maximum=1, of_residual=True)

    def __post_init__(self) -> None:
        if self.k > self.chunk:
            raise UserError(f"k={self.k}: a chunk has {self.chunk} numbers; use a larger chunk, or at most that many")
        if self.bits not in (1, 2, 4, 8, *_DTYPES):
            raise UserError(f"bits={self.bits}: the choices are 1, 2, 4, 8, 16 (bf16) and 32 (fp32)")


@dataclass(frozen=True)
class _Chunks:
    """What is sent of k parameters of n numbers each, and how.

    Args:
        config: the options.
        k, n: number of parameters, and of the numbers of each.
    """

    config: ChunkedTopKConfig
    k: int
    n: int

    @property
    def chunks(self) -> int:
        """Full chunks of a parameter; a shorter one may follow."""
        return self.n // self.config.chunk

    @property
    def tail(self) -> int:
        """Numbers behind the last full chunk."""
        return self.n % self.config.chunk

    @property
    def of_tail(self) -> int:
        """How many of those are sent: as large a share as of a full chunk, rounded up."""
        return -(-self.config.k * self.tail // self.config.chunk)

    @property
    def chosen(self) -> int:
        """Numbers of a parameter that are sent."""
        return self.chunks * self.config.k + self.of_tail

    @property
    def index_bits(self) -> int:
        """Bits of a place in a chunk; of a single place, that may also be none."""
        return (self.config.chunk - (self.config.k > 1)).bit_length()

    @property
    def bins(self) -> int:
        """Bins of the values of each parameter; 0 where values are floating-point numbers."""
        return 0 if self.config.bits in _DTYPES else 1 << self.config.bits

    @cached_property
    def message(self) -> ScaledCodes:
        """The layout of the message: the bins' means, or the values; the places' bits above the lowest 8, and those;
        the bins. Codes are packed 8 by 8."""
        count = self.k * self.chosen
        octets = -(-count // 8)
        high, low = octets * max(self.index_bits - 8, 0), octets * min(self.index_bits, 8)
        if self.bins:
            return ScaledCodes((self.k * self.bins,), torch.float32, (high, low, octets * self.config.bits))
        return ScaledCodes((count,), _DTYPES[self.config.bits], (high, low, 0))

    def _rows(self, x_kc: Tensor) -> list[tuple[Tensor, int]]:
        """What belongs to the chunks, (rows, chosen of each), and their length: full ones, and those behind them."""
        cut = self.chunks * self.config.k
        rows = [(x_kc[:, :cut].reshape(-1, self.config.k), self.config.chunk)]
        return [*rows, (x_kc[:, cut:], self.tail)] if self.tail else rows

    def _joined(self, rows: Sequence[Tensor]) -> Tensor:
        """The inverse of ``_rows``, (k, chosen)."""
        return torch.cat([part.reshape(self.k, part.numel() // max(self.k, 1)) for part in rows], dim=1)

    def choose(self, x_kn: Tensor) -> Tensor:
        """Places of the largest magnitudes in their chunks, (k, chosen), int64."""
        full = self.chunks * self.config.chunk
        rows = [abs_topk(x_kn[:, :full].reshape(-1, self.config.chunk), self.config.k)]
        if self.tail:
            rows.append(abs_topk(x_kn[:, full:].contiguous(), self.of_tail))
        return self._joined(rows)

    def flattened(self, places_kc: Tensor) -> Tensor:
        """Places in chunks as indices into the flattened parameters."""
        chunk, device = self.config.chunk, places_kc.device
        starts_c = torch.arange(self.chosen, device=device) // self.config.k * chunk
        starts_k1 = torch.arange(self.k, device=device).unsqueeze(1) * self.n
        return (places_kc + starts_c + starts_k1).view(-1)

    def encode(self, places_kc: Tensor, values_kc: Tensor) -> Tensor:
        """The message, uint8."""
        wire = torch.empty(self.message.nbytes, dtype=torch.uint8, device=places_kc.device)
        (table,), (high, low, codes) = self.message.to_write(wire)
        places_kc, values_kc = self._without_zeros(places_kc, values_kc)
        places = places_kc.view(-1)
        if self.index_bits > 8:
            pack_bits((places >> 8).to(torch.uint8), self.index_bits - 8, high)
        pack_bits((places & 0xFF).to(torch.uint8), min(self.index_bits, 8), low)
        if self.bins:
            bins_kc, means_kb = _binned(values_kc.float(), self.bins)
            table.copy_(means_kb.view(-1))
            pack_bits(bins_kc.view(-1), self.config.bits, codes)
        else:
            table.copy_(_within(values_kc, table.dtype).view(-1))
        return wire

    def _without_zeros(self, places_kc: Tensor, values_kc: Tensor) -> tuple[Tensor, Tensor]:
        """Places as they are sent (``_marked``), and the values in their order. No bin is a zero's."""
        parts = zip(self._rows(places_kc), self._rows(values_kc == 0), strict=True)
        places, orders = zip(*(_marked(rows, zero, length) for (rows, length), (zero, _) in parts), strict=True)
        begins_c = torch.arange(self.chosen, device=places_kc.device) // self.config.k * self.config.k
        return self._joined(places), values_kc.gather(1, self._joined(orders) + begins_c)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Indices into the flattened parameters, the values there, and whether each was sent; where not, it is 0."""
        (table,), (high, low, codes) = self.message.to_read(wire)
        count = self.k * self.chosen
        places = unpack_bits(low, min(self.index_bits, 8), count).to(torch.int64)
        if self.index_bits > 8:
            places |= unpack_bits(high, self.index_bits - 8, count).to(torch.int64) << 8
        places_kc = places.view(self.k, self.chosen)
        sent_kc = self._joined([_sent(rows, length) for rows, length in self._rows(places_kc)])
        if self.bins:
            bins_kc = unpack_bits(codes, self.config.bits, count).to(torch.int64).view(self.k, self.chosen)
            values_kc = table.view(self.k, self.bins).gather(1, bins_kc)
        else:
            values_kc = table.view(self.k, self.chosen)
        values = torch.where(sent_kc, values_kc, 0.0).view(-1).to(dtype)
        return self.flattened(torch.where(sent_kc, places_kc, 0)), values, sent_kc.view(-1)


def _marked(places_rc: Tensor, zero_rc: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Places as they are sent, and the order that this takes.

    Those of numbers come first, ascending. The others repeat the last of them; without any they are 1, 0, 0, ..., or,
    where there is one alone, the length of the chunk.

    Args:
        places_rc: ascending places in chunks.
        zero_rc: where there is a zero.
        length: numbers of a chunk.
    """
    ordered_rc, order_rc = (places_rc + zero_rc * length).sort(dim=1)
    if places_rc.shape[1] == 1:
        return ordered_rc.clamp(max=length), order_rc
    last_rc = torch.where(ordered_rc < length, ordered_rc, -1).cummax(dim=1).values
    empty_c = (torch.arange(places_rc.shape[1], device=places_rc.device) == 0).to(places_rc.dtype)
    return torch.where(last_rc < 0, empty_c, last_rc), order_rc


def _sent(places_rc: Tensor, length: int) -> Tensor:
    """Which of the places that ``_marked`` made hold numbers."""
    if places_rc.shape[1] < 2:
        return places_rc < length
    first_r1 = places_rc[:, :1] <= places_rc[:, 1:2]
    return torch.cat([first_r1, places_rc[:, 1:] > places_rc[:, :-1]], dim=1)


@dataclass(frozen=True)
class _Chosen(Approximation):
    """What some ranks have sent of a tensor: places, and the values there. Places that come again are of zeros."""

    pieces: Sequence[tuple[Tensor, Tensor]]

    def write_to(self, out: Tensor) -> None:
        self._add(out.zero_(), 1.0)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        self._add(x, -share)

    def _add(self, x: Tensor, factor: float) -> None:
        for indices, values in self.pieces:
            x.view(-1).index_add_(0, indices, values, alpha=factor)


def _binned(values_kc: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """The bin of each value, uint8, and the mean of each bin (k, bins), fp32.

    Bins are equally wide and span 6 standard deviations around the mean of a row; the outer ones are open. Zeros do not
    count. A row with a number that is not finite has a bin whose mean is not.
    """
    wide_kc = values_kc.double()
    counted_kc = (wide_kc != 0).double()
    count_k1 = counted_kc.sum(dim=1, keepdim=True).clamp(min=1.0)
    mean_k1 = wide_kc.sum(dim=1, keepdim=True) / count_k1
    variance_k1 = ((wide_kc - mean_k1).square() * counted_kc).sum(dim=1, keepdim=True) / count_k1
    width_k1 = variance_k1.sqrt() * (SIGMAS / bins)
    # Where all values are equal, any width will do.
    steps_kc = (wide_kc - mean_k1) / torch.where(width_k1 > 0, width_k1, 1.0)
    bins_kc = (steps_kc.floor().nan_to_num() + bins // 2).clamp(0, bins - 1).to(torch.int64)
    flat = (bins_kc + torch.arange(len(values_kc), device=values_kc.device).unsqueeze(1) * bins).view(-1)
    # One dimension: torch adds up in a fixed order there, where it is asked to be deterministic.
    zeros = wide_kc.new_zeros(len(values_kc) * bins)
    sums, counts = (zeros.scatter_add(0, flat, each.view(-1)) for each in (wide_kc, counted_kc))
    return bins_kc.to(torch.uint8), (sums / counts.clamp(min=1)).float().view(-1, bins)


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a narrower type. Finite ones stay finite, so that error feedback makes up for what they lose."""
    most = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(dtype)


class ChunkedTopK(RoundCompressor):
    """All-gathers the ranks' choices.

    ``merge=ranks`` adds up what they sent, so that nothing is lost or made up. ``merge=senders`` takes the mean over
    those that sent a place in place of the mean over all: a larger step where few agree. A residual keeps what its rank
    did not send in either case, so this one's sums are not conserved, and no more are they with a ``decay``.
    """

    config: ChunkedTopKConfig

    def __init__(self, config: ChunkedTopKConfig) -> None:
        super().__init__(config)
        self.traits = SumTraits(batched=True, gathers=True, density=config.k / config.chunk)

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        count = torch.Size(shape).numel()
        return len(shape) > 1 and _Chunks(self.config, 1, count).message.nbytes < 4 * count

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        residual = state.get(RESIDUAL)
        if self.config.decay < 1 and residual is not None:
            # x holds the residual already; what fades counts as sent.
            x.sub_(residual, alpha=1.0 - self.config.decay)
        layout = _Chunks(self.config, x.shape[0], x[0].numel() if x.shape[0] else 0)
        places_kc = layout.choose(x.view(layout.k, layout.n))
        values = gather_packed(x.view(-1), layout.flattened(places_kc))
        wire = layout.encode(places_kc, values.view(places_kc.shape))
        wires = yield Request(wire, Op.GATHER)
        pieces = [layout.decode(other, x.dtype) for other in wires]
        total = [piece[:2] for piece in pieces] if self.config.merge == "ranks" else _over_senders(pieces, x)
        return Aggregate(_Chosen(total), _Chosen([pieces[peers.rank][:2]]))


def _over_senders(pieces: Sequence[tuple[Tensor, Tensor, Tensor]], like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pieces whose sum is, at each place, that of all ranks if each had sent the senders' mean."""
    senders_n = like.new_zeros(like.numel())
    for indices, values, sent in pieces:
        senders_n.index_add_(0, indices, sent.to(values.dtype))
    factors_n = len(pieces) / senders_n.clamp_(min=1.0)
    return [(indices, values * factors_n[indices]) for indices, values, _ in pieces]


def register(registry: Registry) -> None:
    """Registers ``chunked-topk``."""
    points = frozenset({Point.DP_GRAD, Point.EMBED_GRAD})
    registry.register(
        "chunked-topk",
        Registration(
            ChunkedTopKConfig,
            rounds=ChunkedTopK,
            points=points,
            feedback=dict.fromkeys(points, "local"),
            instead=("fixpoint",),
        ),
    )

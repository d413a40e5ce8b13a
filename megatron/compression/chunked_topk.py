"""Chunked Top-K: the largest numbers of every short chunk, with their positions and values in a few bits.

SparseLoCo (arXiv 2508.15706), with Covenant-72B's choice of 64 of each 4,096 numbers and 2 bits per value. A position
in a chunk takes 8 bits (``sorted_places.py``), compared with 12 in Covenant-72B: 0.156 bits per number of the tensor.
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
from megatron.compression.message import ScaledCodes
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.sorted_places import SortedPlaces
from megatron.compression.state import CompressorState
from megatron.kernels.ops import abs_topk, gather_packed, pack_bits, unpack_bits

SIGMAS = 6.0
"""Width of all value bins together, in standard deviations around the mean."""

_DTYPES = {16: torch.bfloat16, 32: torch.float32}
"""Dtypes of values without bins. Not fp16: gradients without the loss scale are below its range."""


@dataclass(frozen=True)
class ChunkedTopKConfig:
    """The largest values of every chunk, with positions and values in a few bits."""

    chunk: int = opt(4096, "consecutive elements of a parameter in a chunk", minimum=2, maximum=1 << 16)
    k: int = opt(64, "values sent per chunk", minimum=1, scheduled=True)
    bits: int = opt(
        2, "bits per value: 1, 2, 4 or 8 select a bin, whose mean is sent once per parameter; 16 is bf16, 32 fp32"
    )
    merge: Literal["ranks", "senders"] = opt(
        "ranks", "the sum at a position, or the mean over the ranks that sent it times the number of ranks"
    )

    def __post_init__(self) -> None:
        if self.k > self.chunk:
            raise UserError(f"k={self.k}: a chunk has {self.chunk} numbers; use a larger chunk, or at most that many")
        if self.bits not in (1, 2, 4, 8, *_DTYPES):
            raise UserError(f"bits={self.bits}: the choices are 1, 2, 4, 8, 16 (bf16) and 32 (fp32)")


@dataclass(frozen=True)
class _Chunks:
    """Message layout for k parameters of n numbers each.

    Args:
        config: the options.
        k, n: number of parameters, and of numbers in each.
    """

    config: ChunkedTopKConfig
    k: int
    n: int

    @property
    def chunks(self) -> int:
        """Full chunks of a parameter; a shorter chunk may follow."""
        return self.n // self.config.chunk

    @property
    def tail(self) -> int:
        """Numbers after the last full chunk."""
        return self.n % self.config.chunk

    @property
    def tail_count(self) -> int:
        """Number of values sent for the tail: the same share as of a full chunk, rounded up."""
        return -(-self.config.k * self.tail // self.config.chunk)

    @property
    def chosen(self) -> int:
        """Numbers of a parameter that are sent."""
        return self.chunks * self.config.k + self.tail_count

    @cached_property
    def places(self) -> tuple[SortedPlaces, SortedPlaces]:
        """Codes of positions in full chunks, and in the tails after them.

        A position equal to the chunk's length stands for a value that is not sent.
        """
        config = self.config
        return (
            SortedPlaces(self.k * self.chunks, config.k, config.chunk),
            SortedPlaces(self.k if self.tail else 0, self.tail_count, self.tail),
        )

    @property
    def bins(self) -> int:
        """Bins of the values of each parameter; 0 where values are floating-point numbers."""
        return 0 if self.config.bits in _DTYPES else 1 << self.config.bits

    @cached_property
    def message(self) -> ScaledCodes:
        """Layout of the message: means of the bins, or values; positions in full chunks and in tails; and the bins,
        packed 8 by 8."""
        count = self.k * self.chosen
        places = sum((code.sizes for code in self.places), ())
        if self.bins:
            return ScaledCodes((self.k * self.bins,), torch.float32, (*places, -(-count // 8) * self.config.bits))
        return ScaledCodes((count,), _DTYPES[self.config.bits], (*places, 0))

    def _join_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Join values of full chunks and of tails to (k, chosen)."""
        columns = [row.reshape(self.k, row.numel() // max(self.k, 1)) for row in rows]
        return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]

    def choose(self, x_kn: Tensor) -> list[Tensor]:
        """Positions of the largest magnitudes in their chunks, int64: (rows, chosen per chunk) of full chunks, then of
        tails."""
        full = self.chunks * self.config.chunk
        rows = [abs_topk(x_kn[:, :full].reshape(-1, self.config.chunk), self.config.k)]
        if self.tail:
            rows.append(abs_topk(x_kn[:, full:].contiguous(), self.tail_count))
        return rows

    def flatten_places(self, rows: Sequence[Tensor]) -> Tensor:
        """Convert positions in full chunks and in tails to indices into the flattened parameters."""
        starts_k1 = torch.arange(self.k, device=rows[0].device).unsqueeze(1) * self.n
        starts_c = torch.arange(self.chunks, device=rows[0].device) * self.config.chunk
        starts = ((starts_k1 + starts_c).view(-1, 1), starts_k1 + self.chunks * self.config.chunk)
        return self._join_rows([places + start for places, start in zip(rows, starts, strict=False)]).view(-1)

    def encode(self, places: Sequence[Tensor], values_kc: Tensor) -> Tensor:
        """Encode values at the positions from ``choose`` to a message, uint8."""
        wire = torch.empty(self.message.nbytes, dtype=torch.uint8, device=values_kc.device)
        (table,), (*place_sections, codes) = self.message.to_write(wire)
        values = []
        cut = self.chunks * self.config.k
        split_values = [values_kc[:, :cut].reshape(-1, self.config.k), values_kc[:, cut:]]
        rows = zip(self.places, places, split_values, strict=False)  # ``places`` has one entry without tails
        for number, (code, places_rc, values_rc) in enumerate(rows):
            # Nonzero values first, by ascending position, then the chunk's length for each zero: zeros get no bin.
            narrow_rc = places_rc.to(torch.int32)  # sorts in half the time
            ordered_rc, order_rc = torch.where(values_rc == 0, narrow_rc + code.largest, narrow_rc).sort(dim=1)
            code.encode(ordered_rc.clamp_(max=code.largest), place_sections[3 * number : 3 * number + 3])
            values.append(values_rc.gather(1, order_rc))
        values_kc = self._join_rows(values)
        if self.bins:
            bins_kc, means_kb = _bin_values(values_kc.float(), self.bins)
            table.copy_(means_kb.view(-1))
            pack_bits(bins_kc.view(-1), self.config.bits, codes)
        else:
            # Finite values stay finite, so that error feedback can compensate for the error.
            most = torch.finfo(table.dtype).max
            narrow_kc = torch.where(values_kc.isfinite(), values_kc.clamp(-most, most), values_kc).to(table.dtype)
            table.copy_(narrow_kc.view(-1))
        return wire

    def decode(self, wire: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Decode to indices into the flattened parameters, values (0 if not sent), and whether each was sent."""
        (table,), (*place_sections, codes) = self.message.to_read(wire)
        places, zeros = [], []
        for number, code in enumerate(self.places[: 2 if self.tail else 1]):
            places_rc = code.decode(place_sections[3 * number : 3 * number + 3])
            zeros.append(places_rc >= code.largest)
            places.append(places_rc.masked_fill_(zeros[-1], 0))
        if self.bins:
            bins_kc = unpack_bits(codes, self.config.bits, self.k * self.chosen).to(torch.int64)
            values_kc = table.view(self.k, self.bins).gather(1, bins_kc.view(self.k, self.chosen))
        else:
            values_kc = table.view(self.k, self.chosen)
        zero_kc = self._join_rows(zeros)
        values = values_kc.masked_fill(zero_kc, 0.0).view(-1).to(dtype)
        return self.flatten_places(places), values, zero_kc.logical_not().view(-1)


@dataclass(frozen=True)
class _SentElements(Approximation):
    """Elements of a tensor sent by some ranks: indices and values. Repeated indices have zero values."""

    pieces: Sequence[tuple[Tensor, Tensor]]

    def write_to(self, out: Tensor) -> None:
        self.subtract_from(out.zero_(), -1.0)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        for indices, values in self.pieces:
            x.view(-1).index_add_(0, indices, values, alpha=-share)


def _bin_values(values_kc: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Bin of each value, uint8, and mean of each bin (k, bins), fp32.

    Bins are equally wide and span 6 standard deviations around the mean of a row; the outermost bins are open. Zeros
    are ignored. In a row with a nonfinite number, the mean of some bin is nonfinite.
    """
    wide_kc = values_kc.double()
    counted_kc = (wide_kc != 0).double()
    count_k1 = counted_kc.sum(dim=1, keepdim=True).clamp(min=1.0)
    mean_k1 = wide_kc.sum(dim=1, keepdim=True) / count_k1
    variance_k1 = ((wide_kc - mean_k1).square() * counted_kc).sum(dim=1, keepdim=True) / count_k1
    width_k1 = variance_k1.sqrt() * (SIGMAS / bins)
    # If all values are equal, any width will do.
    steps_kc = (wide_kc - mean_k1) / torch.where(width_k1 > 0, width_k1, 1.0)
    bins_kc = (steps_kc.floor().nan_to_num() + bins // 2).clamp(0, bins - 1).to(torch.int64)
    flat = (bins_kc + torch.arange(len(values_kc), device=values_kc.device).unsqueeze(1) * bins).view(-1)
    # In one dimension, because torch then adds in a fixed order in deterministic mode.
    zeros = wide_kc.new_zeros(len(values_kc) * bins)
    sums, counts = (zeros.scatter_add(0, flat, each.view(-1)) for each in (wide_kc, counted_kc))
    return bins_kc.to(torch.uint8), (sums / counts.clamp(min=1)).float().view(-1, bins)


class ChunkedTopK(RoundCompressor):
    """All-gather of each rank's largest values per chunk.

    ``merge=ranks`` adds up the values that the ranks sent, so the sum is conserved. ``merge=senders`` averages over the
    ranks that sent a position instead of over all ranks, which makes larger steps where few ranks agree. The residual
    is the unsent part in both cases, so ``merge=senders`` does not conserve the sum.
    """

    config: ChunkedTopKConfig

    def __init__(self, config: ChunkedTopKConfig) -> None:
        super().__init__(config)
        self.traits = SumTraits(batched=True, gathers=True, density=config.k / config.chunk)

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        count = torch.Size(shape).numel()
        return len(shape) > 1 and _Chunks(self.config, 1, count).message.nbytes < 4 * count

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        layout = _Chunks(self.config, x.shape[0], x[0].numel() if x.shape[0] else 0)
        places = layout.choose(x.view(layout.k, layout.n))
        values = gather_packed(x.view(-1), layout.flatten_places(places))
        wire = layout.encode(places, values.view(layout.k, layout.chosen))
        wires = yield Request(wire, Op.GATHER)
        pieces = [layout.decode(other, x.dtype) for other in wires]
        total = [piece[:2] for piece in pieces]
        if self.config.merge == "senders":
            # The sum at an index becomes the senders' mean times the number of ranks.
            senders_n = x.new_zeros(x.numel())
            for indices, values, sent in pieces:
                senders_n.index_add_(0, indices, sent.to(values.dtype))
            factors_n = len(pieces) / senders_n.clamp_(min=1.0)
            total = [(indices, values * factors_n[indices]) for indices, values in total]
        return Aggregate(_SentElements(total), _SentElements([pieces[peers.rank][:2]]))


def register(registry: Registry) -> None:
    """Register ``chunked-topk``."""
    points = frozenset({Point.DP_GRAD, Point.EMBED_GRAD})
    registry.register(
        "chunked-topk",
        Registration(
            ChunkedTopKConfig,
            rounds=ChunkedTopK,
            points=points,
            feedback=dict.fromkeys(points, "local"),
            alternatives=("fixpoint",),
            source="SparseLoCo, Sarfi et al. 2025; the defaults are those of Covenant-72B",
            example="dp-grad=chunked-topk,chunk=4096,k=512,bits=2",
        ),
    )

"""Two-step all-reduces of short messages: an all-to-all of parts, summed in fp32, and an all-gather of the sums."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Op, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.approximation import Approximation
from megatron.compression.state import CompressorState


class Format(Protocol):
    """A message format: tensors to bytes and back, without state."""

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes of a tensor's message, a multiple of 4."""

    def encode(self, x: Tensor, seed: int | None, *, wire: Tensor) -> Tensor:
        """Writes the message, uint8, to ``wire``; ``seed`` draws the noise of stochastic rounding."""

    def decode(self, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        """Decodes a message to fp32: a new tensor, or ``out``."""

    def add_to(self, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        """Adds a decoded message, or subtracts it, in place."""


@dataclass(frozen=True)
class Messages(Approximation):
    """A flattened tensor as messages of its consecutive parts, some of which may be empty."""

    format: Format
    wires: Tensor
    spans: Sequence[slice]

    def write_to(self, out: Tensor) -> None:
        for wire, part in self._parts(out):
            self.format.decode(wire, part.shape, part)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        for wire, part in self._parts(x):
            if share == 1.0:
                self.format.add_to(part, wire, negative=True)
            else:
                part.sub_(self.format.decode(wire, part.shape), alpha=share)

    def _parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        flat = x.view(-1)
        yield from ((wire, flat[span]) for wire, span in zip(self.wires, self.spans, strict=True))


@dataclass(frozen=True)
class _Contribution(Approximation):
    """A rank's messages decoded, and the error of the shortened sum of the part that it serves."""

    sent: Messages
    span: slice
    error_n: Tensor

    def write_to(self, out: Tensor) -> None:
        self.sent.write_to(out)
        out.view(-1)[self.span].add_(self.error_n)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        self.sent.subtract_from(x, share)
        x.view(-1)[self.span].sub_(self.error_n, alpha=share)


class TwoStepSum(RoundCompressor):
    """Each rank sends (n - 1)/n of the messages' bytes twice, as a ring all-reduce would of the numbers.

    A rank's contribution is what its messages hold, and in the part that it sums, the error of shortening the sum as
    well: with error feedback both are made up for, each by the rank that made it.
    """

    format: Format
    traits = SumTraits(steady=("messages",))

    @abstractmethod
    def seed(self, state: CompressorState, message: int) -> int | None:
        """The seed of the noise of this step's message with a number; None without stochastic rounding."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        flat = x.view(-1)
        part = -(-flat.numel() // peers.size)
        spans = [slice(i * part, (i + 1) * part) for i in range(peers.size)]
        size = self.format.nbytes(torch.Size((part,)))
        wires = torch.zeros((peers.size, size), dtype=torch.uint8, device=x.device)
        for i, span in enumerate(spans):
            self._encode(flat[span], self.seed(state, i), wires[i])
        received = yield Request(wires, Op.EXCHANGE)
        own = flat[spans[peers.rank]]
        sum_n = torch.zeros_like(own)
        for wire in received:
            self.format.add_to(sum_n, wire)
        wire = torch.zeros(size, dtype=torch.uint8, device=x.device)
        self._encode(sum_n, self.seed(state, peers.size), wire)
        error_n = self.format.add_to(sum_n.neg_(), wire)
        gathered = yield Request(wire, Op.GATHER)
        state.stage("messages", state.count("messages") + 1)
        local = _Contribution(Messages(self.format, wires, spans), spans[peers.rank], error_n)
        return Aggregate(Messages(self.format, gathered, spans), local)

    def _encode(self, x: Tensor, seed: int | None, row: Tensor) -> None:
        """Writes a message to the beginning of a row, which the shorter last part does not fill."""
        self.format.encode(x, seed, wire=row[: self.format.nbytes(x.shape)])

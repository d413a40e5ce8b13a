"""Two-step all-reduces of short messages: all-to-alls of parts, summed in fp32, and all-gathers of the sums.

One level is the whole group. Two levels are the ranks of a node, then those at one place of all nodes (SDP4Bit, Jia et
al. 2024): between nodes each number crosses once for a node, whatever the ranks in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor, SumTraits
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

    @property
    def plain(self) -> Format:
        """The same messages, as those of the numbers that a linear transform such as a rotation has made of the input.

        Sums are taken of these, and only what comes out of the last one is transformed back.
        """
        return self

    def coded(self, count: int) -> int:
        """Transformed numbers of a message of so many."""
        return count


@dataclass(frozen=True)
class Messages(Approximation):
    """A flattened tensor, or parts of it, as messages of its parts, some of which may be empty."""

    format: Format
    wires: Tensor
    spans: Sequence[slice]

    def write_to(self, out: Tensor) -> None:
        for wire, part in self._parts(out):
            self.format.decode(wire, part.shape, part)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        for wire, part in self._parts(x):
            if abs(share) == 1.0:
                self.format.add_to(part, wire, negative=share > 0)
            else:
                part.sub_(self.format.decode(wire, part.shape), alpha=share)

    def _parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        flat = x.view(-1)
        yield from ((wire, flat[span]) for wire, span in zip(self.wires, self.spans, strict=True))


@dataclass(frozen=True)
class _Share(Approximation):
    """One part of a flattened tensor; the rest stays as it is."""

    span: slice
    x_n: Tensor

    def write_to(self, out: Tensor) -> None:
        out.view(-1)[self.span].copy_(self.x_n)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        x.view(-1)[self.span].sub_(self.x_n, alpha=share)


@dataclass(frozen=True)
class _Hop:
    """An exchange among some ranks of the group, and the all-gather that answers it.

    Args:
        level: which ranks these are.
        format: format of the messages.
        rows: the parts that each of these ranks sums up, by the rank of the group that they belong to in the end.
        place: this rank's place among them.
    """

    level: Level
    format: Format
    rows: Sequence[tuple[int, ...]]
    place: int

    def encode(
        self, parts: Mapping[int, Tensor], longest: int, seeds: Mapping[int, int | None], transformed: bool
    ) -> Tensor:
        """Messages of parts, a row for each rank; that of a shorter part does not fill its place."""
        format, device = self.format.plain if transformed else self.format, next(iter(parts.values())).device
        size = self.format.nbytes(torch.Size((longest,)))
        wires = torch.empty((len(self.rows), len(self.rows[0]), size), dtype=torch.uint8, device=device)
        for row, numbers in zip(wires, self.rows, strict=True):
            for wire, number in zip(row, numbers, strict=True):
                x = parts[number]
                filled = format.nbytes(x.shape)
                format.encode(x, seeds[number], wire=wire[:filled])
                if filled < size:
                    wire[filled:] = 0
        return wires

    def in_order(self, parts: Mapping[int, Tensor]) -> list[Tensor]:
        """Parts as their messages are ordered."""
        return [parts[number] for row in self.rows for number in row]

    def messages(self, wires: Tensor, spans: Sequence[slice], rows: Sequence[tuple[int, ...]]) -> Messages:
        """Wires, row after row, as the messages of the rows' parts."""
        held = [spans[part] for row in rows for part in row]
        return Messages(self.format, wires.view(len(held), wires.numel() // len(held)), held)

    def summed(self, received: Tensor, flat: Tensor, spans: Sequence[slice], transformed: bool) -> dict[int, Tensor]:
        """The sums of what was received for this rank's parts, left in the transformed numbers or not."""
        sums = {}
        for index, part in enumerate(self.rows[self.place]):
            count, format = flat[spans[part]].numel(), self.format
            if transformed:
                count, format = format.coded(count), format.plain
            sums[part] = flat.new_empty(count)
            format.decode(received[0, index], sums[part].shape, sums[part])
            for row in received[1:]:
                format.add_to(sums[part], row[index])
        return sums


@dataclass(frozen=True)
class _Shortened:
    """Sums that messages were made of.

    Args:
        sent: the messages.
        sums_n: the sums, in the order of the messages.
        taken: the messages to this rank that they are the sums of.
    """

    sent: Messages
    sums_n: Sequence[Tensor]
    taken: Messages

    def errors(self) -> tuple[list[Approximation], list[Approximation]]:
        """What the messages lost, as the first ones less the second ones.

        That of transformed numbers is messages. Another one is computed in place of the sums: this reads less.
        """
        format = self.sent.format
        if format.plain is not format:
            return [self.sent], [self.taken]
        parts = zip(self.sums_n, self.sent.wires, self.sent.spans, strict=True)
        return [], [_Share(span, format.add_to(x_n, wire, negative=True)) for x_n, wire, span in parts]


@dataclass(frozen=True)
class _Contribution(Approximation):
    """What a rank has put into a sum: its messages of the whole tensor, and the errors of the sums that it shortened.

    Over all ranks this leaves what the last messages hold, whatever was lost in between: each rank accounts for what
    its own messages lost.
    """

    first: Messages
    shortened: Sequence[_Shortened]

    @cached_property
    def _errors(self) -> list[tuple[list[Approximation], list[Approximation]]]:
        """Computed where somebody asks, and after all messages: none waits for what others have lost."""
        return [sums.errors() for sums in self.shortened]

    def write_to(self, out: Tensor) -> None:
        self.first.write_to(out)
        self._subtract_errors(out, -1.0)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        self.first.subtract_from(x, share)
        self._subtract_errors(x, share)

    def _subtract_errors(self, x: Tensor, share: float) -> None:
        for made, _ in self._errors:
            for part in made:
                part.subtract_from(x, share)
        for _, taken in self._errors:
            for part in taken:
                part.subtract_from(x, -share)


class TwoStepSum(RoundCompressor):
    """Each rank sends (n - 1)/n of the messages' bytes twice, as a ring all-reduce would of the numbers.

    The tensor is cut into a part for each rank of the group. In an exchange every rank sends messages of the parts that
    the others are to sum up; where there are two levels, those of a rank's node sum up what the same places of all
    nodes exchange then. The rank whose part it is sends a message of the whole sum, which is passed on as it is. Where
    each rank reads its own part alone, nothing is sent back, and the sum is not shortened.

    A rank's contribution is what its first messages hold, and the error of all sums that it has shortened: with error
    feedback each is made up for by the rank that made it.
    """

    format: Format
    inside: Format | None = None
    """The format between ranks of a node; None for sums in one level."""
    traits = SumTraits(steady=("messages",))

    @abstractmethod
    def seed(self, state: CompressorState, message: int) -> int | None:
        """The seed of the noise of this step's message with a number; None without stochastic rounding."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        flat, hops = x.view(-1), self._hops(peers)
        part = -(-flat.numel() // peers.size)
        spans = [slice(i * part, (i + 1) * part) for i in range(peers.size)]
        shares = peers.sharded and part * peers.size == flat.numel()
        parts = {i: flat[span] for i, span in enumerate(spans)}
        messages: list[Messages] = []
        taken: list[Messages] = []
        shortened: list[_Shortened] = []
        for number, hop in enumerate(hops):
            seeds = {i: self._seed(state, peers, number, i) for i in parts}
            wires = hop.encode(parts, part, seeds, transformed=number > 0)
            messages.append(hop.messages(wires, spans, hop.rows))
            if number:
                shortened.append(_Shortened(messages[-1], hop.in_order(parts), taken[-1]))
            received = yield Request(wires, Op.EXCHANGE, level=hop.level)
            taken.append(hop.messages(received, spans, [hop.rows[hop.place]] * len(hop.rows)))
            parts = hop.summed(received, flat, spans, transformed=not (shares and hop is hops[-1]))
        if shares:
            total: Approximation = _Share(spans[peers.rank], parts[peers.rank])
        else:
            own = replace(hops[-1], rows=[(peers.rank,)])
            seeds = {peers.rank: self._seed(state, peers, len(hops), peers.rank)}
            wire = own.encode(parts, part, seeds, transformed=True)
            shortened.append(_Shortened(own.messages(wire, spans, own.rows), own.in_order(parts), taken[-1]))
            wire = wire.view(-1)
            for hop in reversed(hops):
                wire = yield Request(wire, Op.GATHER, level=hop.level)
            total = own.messages(wire, spans, hops[0].rows)
        state.stage("messages", state.count("messages") + 1)
        return Aggregate(total, _Contribution(messages[0], shortened))

    def _seed(self, state: CompressorState, peers: Peers, step: int, part: int) -> int | None:
        """The seed of a part's message in a step of the sum.

        Ranks hold like numbers, and nodes like sums: noise that they shared would add up, where noise of each rank's
        own averages out.
        """
        return self.seed(state, (step * peers.size + peers.rank) * peers.size + part)

    def _hops(self, peers: Peers) -> list[_Hop]:
        """The exchanges of a sum; a level that is a single rank is left out."""
        if self.inside is None or not peers.nodes or peers.size == 1:
            return [_Hop(Level.ALL, self.format, [(rank,) for rank in range(peers.size)], peers.rank)]
        node, across = peers.members(Level.NODE), peers.members(Level.ACROSS)
        places = [replace(peers, rank=rank).members(Level.ACROSS) for rank in node]
        hops = [
            _Hop(Level.NODE, self.inside, places, node.index(peers.rank)),
            _Hop(Level.ACROSS, self.format, [(rank,) for rank in across], across.index(peers.rank)),
        ]
        return [hop for hop in hops if len(hop.rows) > 1]

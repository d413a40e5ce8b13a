"""Two-step compressed all-reduces: an all-to-all of chunks, sums in fp32, and an all-gather of the sums.

With a single level, these run over the whole group. With two levels, they run over the ranks of a node, then over the
ranks with the same local rank on all nodes (SDP4Bit, Jia et al. 2024), so that each number crosses between nodes once
per node, regardless of the number of ranks on it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.approximation import Approximation
from megatron.compression.message import Format, noise_seed
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class Messages(Approximation):
    """Chunks of a flattened tensor in encoded form; chunks may be empty."""

    format: Format
    wires: Tensor
    spans: Sequence[slice]

    def write_to(self, out: Tensor) -> None:
        for wire, span in zip(self.wires, self.spans, strict=True):
            chunk = out.view(-1)[span]
            self.format.decode(wire, chunk.shape, chunk)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        for wire, span in zip(self.wires, self.spans, strict=True):
            chunk = x.view(-1)[span]
            if abs(share) == 1.0:
                self.format.add_to(chunk, wire, negative=share > 0)
            else:
                chunk.sub_(self.format.decode(wire, chunk.shape), alpha=share)


@dataclass(frozen=True)
class _Share(Approximation):
    """A slice of a flattened tensor; other elements are left unchanged."""

    span: slice
    x_n: Tensor

    def write_to(self, out: Tensor) -> None:
        out.view(-1)[self.span].copy_(self.x_n)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        x.view(-1)[self.span].sub_(self.x_n, alpha=share)


@dataclass(frozen=True)
class _Hop:
    """An all-to-all among some ranks of the group, and the all-gather that follows it.

    Args:
        level: the ranks that take part.
        format: format of the messages.
        rows: for each of these ranks, the chunks that it sums, numbered by the group rank that finally owns them.
        index: this rank's index among them.
    """

    level: Level
    format: Format
    rows: Sequence[tuple[int, ...]]
    index: int

    def encode(
        self, chunks: Mapping[int, Tensor], longest: int, seeds: Mapping[int, int | None], transformed: bool
    ) -> Tensor:
        """Encode chunks into messages, a row for each rank; the message of a shorter chunk is padded."""
        format, device = self.format.plain if transformed else self.format, next(iter(chunks.values())).device
        size = self.format.nbytes(torch.Size((longest,)))
        wires = torch.empty((len(self.rows), len(self.rows[0]), size), dtype=torch.uint8, device=device)
        for row, numbers in zip(wires, self.rows, strict=True):
            for wire, number in zip(row, numbers, strict=True):
                x = chunks[number]
                filled = format.nbytes(x.shape)
                format.encode(x, seeds[number], wire=wire[:filled])
                if filled < size:
                    wire[filled:] = 0
        return wires

    def messages(self, wires: Tensor, spans: Sequence[slice], rows: Sequence[tuple[int, ...]]) -> Messages:
        """Wrap wires, row by row, as messages of the rows' chunks."""
        chunk_spans = [spans[number] for row in rows for number in row]
        return Messages(self.format, wires.view(len(chunk_spans), wires.numel() // len(chunk_spans)), chunk_spans)

    def sum_received(
        self, received: Tensor, flat: Tensor, spans: Sequence[slice], transformed: bool
    ) -> dict[int, Tensor]:
        """Sum the messages received for this rank's chunks; the sums may stay transformed."""
        sums = {}
        for index, number in enumerate(self.rows[self.index]):
            count, format = flat[spans[number]].numel(), self.format
            if transformed:
                count, format = format.coded(count), format.plain
            sums[number] = flat.new_empty(count)
            format.decode(received[0, index], sums[number].shape, sums[number])
            for row in received[1:]:
                format.add_to(sums[number], row[index])
        return sums


@dataclass(frozen=True)
class _EncodedSums:
    """Sums that were encoded again.

    Args:
        sent: messages of the sums.
        sums_n: the sums, in the order of the messages.
        messages: the received messages that were summed.
    """

    sent: Messages
    sums_n: Sequence[Tensor]
    messages: Messages

    def errors(self) -> tuple[list[Approximation], list[Approximation]]:
        """Errors of the messages, decoded minus exact sums, as (positive terms, negative terms).

        For transformed numbers, the terms are messages. Otherwise the error overwrites the sums, which saves reads.
        """
        format = self.sent.format
        if format.plain is not format:
            return [self.sent], [self.messages]
        sums = zip(self.sums_n, self.sent.wires, self.sent.spans, strict=True)
        return [], [_Share(span, format.add_to(x_n, wire, negative=True)) for x_n, wire, span in sums]


@dataclass(frozen=True)
class _Contribution(Approximation):
    """A rank's contribution to a sum: its messages of the whole tensor, and the errors of the sums that it encoded.

    Over all ranks, the contributions add up to the final messages: each rank accounts for the errors of its messages.
    """

    first: Messages
    encoded_sums: Sequence[_EncodedSums]

    @cached_property
    def _errors(self) -> list[tuple[list[Approximation], list[Approximation]]]:
        """Errors of the encoded sums, computed lazily after all messages so that no message waits for them."""
        return [sums.errors() for sums in self.encoded_sums]

    def write_to(self, out: Tensor) -> None:
        self.first.write_to(out)
        self._subtract_errors(out, -1.0)

    def subtract_from(self, x: Tensor, share: float = 1.0) -> None:
        self.first.subtract_from(x, share)
        self._subtract_errors(x, share)

    def _subtract_errors(self, x: Tensor, share: float) -> None:
        for positive, _ in self._errors:
            for error in positive:
                error.subtract_from(x, share)
        for _, negative in self._errors:
            for error in negative:
                error.subtract_from(x, -share)


class TwoStepSum(RoundCompressor):
    """Two-step all-reduce. Each rank sends (n - 1)/n of the messages' bytes twice, as in a ring all-reduce.

    The tensor is split into a chunk for each rank of the group. In the all-to-all, every rank sends messages of the
    chunks that other ranks sum. With two levels, the ranks of a node sum first, and then exchange these sums with the
    ranks of the same local rank on all nodes. The rank that owns a chunk encodes its complete sum, and the all-gathers
    forward this message unchanged. If each rank reads only its shard, the all-gathers are skipped, and the sum is not
    encoded.

    A rank's contribution is the content of its first messages plus the errors of all sums that it encoded. With error
    feedback, each error is compensated by the rank that made it.
    """

    format: Format
    inside: Format | None = None
    """Format within a node; None for single-level sums."""
    traits = SumTraits(steady=("messages",), quantizes=True)

    def seed(self, state: CompressorState, message: int) -> int | None:
        """Seed of the noise of this step's message with number ``message``; None without stochastic rounding."""
        return noise_seed(self.config, state, message)

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        flat, hops = x.view(-1), self._make_hops(peers)
        chunk_size = -(-flat.numel() // peers.size)
        spans = [slice(i * chunk_size, (i + 1) * chunk_size) for i in range(peers.size)]
        shares = peers.sharded and chunk_size * peers.size == flat.numel()
        chunks = {i: flat[span] for i, span in enumerate(spans)}
        messages: list[Messages] = []
        inputs: list[Messages] = []
        encoded_sums: list[_EncodedSums] = []
        for number, hop in enumerate(hops):
            seeds = {i: self._seed(state, peers, number, i) for i in chunks}
            wires = hop.encode(chunks, chunk_size, seeds, transformed=number > 0)
            messages.append(hop.messages(wires, spans, hop.rows))
            if number:
                sums_n = [chunks[i] for row in hop.rows for i in row]
                encoded_sums.append(_EncodedSums(messages[-1], sums_n, inputs[-1]))
            received = yield Request(wires, Op.EXCHANGE, level=hop.level)
            inputs.append(hop.messages(received, spans, [hop.rows[hop.index]] * len(hop.rows)))
            chunks = hop.sum_received(received, flat, spans, transformed=not (shares and hop is hops[-1]))
        if shares:
            total: Approximation = _Share(spans[peers.rank], chunks[peers.rank])
        else:
            final = replace(hops[-1], rows=[(peers.rank,)])
            seeds = {peers.rank: self._seed(state, peers, len(hops), peers.rank)}
            wire = final.encode(chunks, chunk_size, seeds, transformed=True)
            encoded_sums.append(_EncodedSums(final.messages(wire, spans, final.rows), [chunks[peers.rank]], inputs[-1]))
            wire = wire.view(-1)
            for hop in reversed(hops):
                wire = yield Request(wire, Op.GATHER, level=hop.level)
            total = final.messages(wire, spans, hops[0].rows)
        state.stage("messages", state.count("messages") + 1)
        return Aggregate(total, _Contribution(messages[0], encoded_sums))

    def _seed(self, state: CompressorState, peers: Peers, step: int, chunk: int) -> int | None:
        """Seed of a chunk's message in a step of the sum.

        Seeds differ between ranks: ranks hold similar numbers, and nodes similar sums, so shared noise would add up,
        while independent noise averages out.
        """
        return self.seed(state, (step * peers.size + peers.rank) * peers.size + chunk)

    def _make_hops(self, peers: Peers) -> list[_Hop]:
        """Make the exchanges of a sum, leaving out levels with a single rank."""
        if self.inside is None or not peers.nodes or peers.size == 1:
            return [_Hop(Level.ALL, self.format, [(rank,) for rank in range(peers.size)], peers.rank)]
        node, across = peers.members(Level.NODE), peers.members(Level.ACROSS)
        places = [replace(peers, rank=rank).members(Level.ACROSS) for rank in node]
        hops = [
            _Hop(Level.NODE, self.inside, places, node.index(peers.rank)),
            _Hop(Level.ACROSS, self.format, [(rank,) for rank in across], across.index(peers.rank)),
        ]
        return [hop for hop in hops if len(hop.rows) > 1]

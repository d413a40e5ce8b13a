"""Runs ``RoundCompressor`` generators over a group."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor
from megatron.compression.approximation import Approximation
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.kernels.ops import sum_of_squares
from megatron.topology.group import Group, Pending, num_bytes

_SHARED = (Op.REDUCE, Op.GATHER, Op.EXCHANGE)
"""Operations whose requests share a collective."""


@dataclass
class TensorReduction:
    """The reduction of one tensor.

    Args:
        compressor: the compressor.
        x: this rank's contribution, contiguous; it belongs to the compressor, which leaves the reduced tensor there.
        state: the compressor's state for this tensor.
    """

    compressor: RoundCompressor
    x: Tensor
    state: CompressorState


@dataclass(frozen=True)
class _Started:
    """A collective that was started, with the results that it has for some of the tensors, by their numbers."""

    communication: Pending
    results: list[tuple[int, Tensor]]
    level: Level


class PackedReduction:
    """A pending reduction of several tensors, whose requests of one round share a collective.

    The first round starts at construction, so it overlaps with what the caller does next; the others run in ``finish``,
    which leaves the reduced tensors in the reductions.

    Args:
        reductions: the tensors and their compressors, in the same order on every rank.
        group: the ranks.
        ledger, point: where the bytes are counted, and as what.
        sharded: this rank reads only its own share of the results.
        raw_bytes: bytes that exact collectives would have sent.
    """

    def __init__(
        self,
        reductions: Sequence[TensorReduction],
        group: Group,
        ledger: Ledger,
        point: Point,
        sharded: bool = False,
        raw_bytes: int | None = None,
    ) -> None:
        self.group, self.ledger, self.point, self.sharded = group, ledger, point, sharded
        self._raw_left = (
            sum(self._raw_bytes(reduction.x) for reduction in reductions) if raw_bytes is None else raw_bytes
        )
        self.reductions = reductions
        self._peers = Peers(group.rank, group.size, sharded=sharded)
        self._generators: list[Generator[Request, Tensor, Aggregate]] = [
            reduction.compressor.rounds(reduction.x, reduction.state, self._peers_of(reduction.compressor))
            for reduction in reductions
        ]
        self._aggregates: list[Aggregate | None] = [None] * len(reductions)
        self._pending: list[_Started] = []
        self._resume(dict.fromkeys(range(len(reductions))))

    def _peers_of(self, compressor: RoundCompressor) -> Peers:
        """The group as a compressor sees it: with its nodes where it asks for them."""
        split = self.group.split
        if split is None or not compressor.traits.levels:
            return self._peers
        return replace(self._peers, nodes=split.nodes)

    def _raw_bytes(self, x: Tensor) -> int:
        """Bytes of an exact ring all-reduce, which compressed bytes are compared with."""
        steps = 1 if self.sharded else 2
        return steps * (self.group.size - 1) * num_bytes(x) // self.group.size

    def _resume(self, results: dict[int, Tensor | None]) -> None:
        """Resumes each generator with its result (None: begins it) and starts the requests of the next round."""
        requests: dict[int, Request] = {}
        with self.ledger.encoding(self.point):
            for index, result in results.items():
                generator = self._generators[index]
                try:
                    requests[index] = next(generator) if result is None else generator.send(result)
                except StopIteration as stop:
                    self._aggregates[index] = stop.value
            self._serve(requests)

    def _serve(self, requests: dict[int, Request]) -> None:
        """Starts the collectives of one round; those of one kind share one."""
        kinds: dict[tuple[Op, Level, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, request in requests.items():
            if request.op in _SHARED and len(requests) > 1:
                kind = request.op, request.level, request.tensor.dtype
                kinds.setdefault(kind, []).append((index, request.tensor))
            else:
                pending, result = start_request(request, self.group, self.sharded)
                self._started(pending, [(index, result)], request.level)
        for (op, level, _), members in kinds.items():
            tensors = [tensor for _, tensor in members]
            size = group_at(self.group, level).size
            packed = tensors[0] if len(tensors) == 1 else _pack(op, tensors, size)
            pending, result = start_request(Request(packed, op, level=level), self.group)
            results = [result] if len(tensors) == 1 else _unpack(op, result, tensors)
            self._started(pending, [(index, part) for (index, _), part in zip(members, results, strict=True)], level)

    def _started(self, pending: Pending, results: list[tuple[int, Tensor]], level: Level) -> None:
        if group_at(self.group, level).size > 1:
            inside = pending.sent_bytes if level is Level.NODE else 0
            self.ledger.sent(self.point, pending.sent_bytes, self._raw_left, inside)
            self._raw_left = 0
        self._pending.append(_Started(pending, results, level))

    def advance(self) -> bool:
        """Waits for the round that was started and starts the next one; returns False where there is none."""
        pending, self._pending = self._pending, []
        results: dict[int, Tensor | None] = {}
        for started in pending:
            self.ledger.wait(self.point, started.communication)
            results.update((index, result.contiguous()) for index, result in started.results)
        self._resume(dict(sorted(results.items())))
        return bool(self._pending)

    def advance_inside_nodes(self) -> bool:
        """Runs the rounds that come before the next one between nodes, which therefore leaves early.

        Returns:
            False where there is none.
        """
        while self._pending and all(started.level is Level.NODE for started in self._pending):
            self.advance()
        return bool(self._pending)

    def wait(self) -> None:
        """Runs the remaining rounds."""
        while self._pending:
            self.advance()

    def finish(self) -> None:
        """Waits; the reduced tensors are in the reductions then, and the compressors' states have changed."""
        self.wait()
        with self.ledger.decoding(self.point):
            for reduction, aggregate in zip(self.reductions, self._aggregates, strict=True):
                assert aggregate is not None
                peers = self._peers_of(reduction.compressor)
                reduction.compressor.finalize(reduction.x, aggregate, reduction.state, peers)
        self._aggregates = []

    def squared_norm(self) -> float:
        """The sum of the squares of the sums, once all rounds have run; nothing has changed yet."""
        total = 0.0
        for reduction, aggregate in zip(self.reductions, self._aggregates, strict=True):
            assert aggregate is not None
            found = aggregate.total
            if isinstance(found, Approximation):
                dense = torch.empty_like(reduction.x)
                found.write_to(dense)
                found = dense
            total += sum_of_squares([found.reshape(-1)])
        return total

    def arrived(self) -> bool:
        """Whether a round is under way, and waiting for it would not block."""
        return bool(self._pending) and all(started.communication.done() for started in self._pending)

    def abandon(self) -> None:
        """Waits for the round that was started and runs no other; all ranks of the group do the same."""
        for started in self._pending:
            started.communication.wait()
        self.close()

    def close(self) -> None:
        """Runs no other round, and waits for none."""
        for generator in self._generators:
            generator.close()
        self._pending = []


def _pack(op: Op, tensors: Sequence[Tensor], size: int) -> Tensor:
    """Tensors of one dtype as one, for a collective over ``size`` ranks."""
    if op is Op.EXCHANGE:
        return torch.cat([tensor.view(size, tensor.numel() // size) for tensor in tensors], dim=1)
    return torch.cat([tensor.view(-1) for tensor in tensors])


def _unpack(op: Op, result: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of the tensors, as views of the packed collective's."""
    if op is Op.REDUCE:
        parts = result.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    size = result.shape[0]
    if op is Op.EXCHANGE:
        parts = result.split([tensor.numel() // size for tensor in tensors], dim=1)
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    parts = result.split([tensor.numel() for tensor in tensors], dim=1)
    return [part.view(size, *tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def start_request(request: Request, group: Group, sharded: bool = False) -> tuple[Pending, Tensor]:
    """Starts the collective of one request; its result is in the tensor once it has completed.

    Args:
        request: the request.
        group: the ranks that reduce, of which the request may name some.
        sharded: this rank reads only its own share of a reduction whose request allows that.

    Raises:
        CompressorFault: when the request names ranks of nodes, and the group was not built with them.
    """
    x, group = request.tensor, group_at(group, request.level)
    if request.op is Op.REDUCE:
        if request.shard_only and sharded and request.level is Level.ALL and x.numel() % group.size == 0:
            flat = x.view(-1)
            share = flat.numel() // group.size
            return group.reduce_scatter(flat[group.rank * share : (group.rank + 1) * share], flat), x
        return group.all_reduce(x), x
    if request.op is Op.GATHER:
        gathered = torch.empty((group.size, *x.shape), dtype=x.dtype, device=x.device)
        return group.all_gather(gathered.view(-1), x.view(-1)), gathered
    if request.op is Op.EXCHANGE:
        received = torch.empty_like(x)
        return group.exchange(received, x), received
    if request.op is Op.COLLECT:
        collected = torch.empty((group.size if group.rank == 0 else 0, *x.shape), dtype=x.dtype, device=x.device)
        return group.collect(collected, x), collected
    return (group.distribute(x) if request.op is Op.DISTRIBUTE else group.broadcast(x)), x


def group_at(group: Group, level: Level) -> Group:
    """The ranks of a group that take part in a request at a level.

    Raises:
        CompressorFault: when the group was not built with its nodes.
    """
    if level is Level.ALL:
        return group
    if group.split is None:
        raise CompressorFault(
            f"a compressor asks for Level.{level.name} over {group.name}, which has no node groups; it must declare "
            "SumTraits(levels=True), and look at Peers.nodes first"
        )
    return group.split.node if level is Level.NODE else group.split.across

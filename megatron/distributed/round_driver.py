"""Driver of ``RoundCompressor`` generators over a group."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor
from megatron.compression.approximation import Approximation
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.results import check_aggregate, check_request
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group, Pending
from megatron.distributed.ledger import Ledger
from megatron.kernels.ops import sum_of_squares


@dataclass
class TensorReduction:
    """The reduction of a tensor.

    Args:
        compressor: the compressor.
        x: this rank's contribution, contiguous; the compressor owns it and writes the reduced tensor there.
        state: the compressor's state for this tensor.
    """

    compressor: RoundCompressor
    x: Tensor
    state: CompressorState


@dataclass(frozen=True)
class _RunningCollective:
    """A collective in flight, with its (tensor index, result) pairs."""

    communication: Pending
    results: list[tuple[int, Tensor]]
    level: Level


class PackedReduction:
    """A pending reduction of several tensors that packs the requests of each round into shared collectives.

    The first round starts at construction, so it overlaps with the caller's next work. The remaining rounds run in
    ``advance`` or ``finish``; ``finish`` leaves the reduced tensors in the reductions.

    Args:
        reductions: the tensors and their compressors, in the same order on every rank.
        group: the ranks.
        ledger, point: ledger that counts the bytes, and the point to charge.
        sharded: whether this rank reads only its own share of the results.
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
        if raw_bytes is None:  # an exact ring all-reduce, or reduce-scatter
            steps = 1 if sharded else 2
            raw_bytes = sum(steps * (group.size - 1) * reduction.x.nbytes // group.size for reduction in reductions)
        self._uncounted_raw_bytes = raw_bytes
        for reduction in reductions if ledger.observers else ():
            reduction.compressor = ledger.audited(point, reduction.compressor)
        self.reductions = reductions
        self._peers = Peers(group.rank, group.size, sharded=sharded)
        self._generators: list[Generator[Request, Tensor, Aggregate]] = [
            reduction.compressor.rounds(reduction.x, reduction.state, self._peers_of(reduction.compressor))
            for reduction in reductions
        ]
        self._aggregates: list[Aggregate | None] = [None] * len(reductions)
        self._pending: list[_RunningCollective] = []
        self._resume(dict.fromkeys(range(len(reductions))))

    def _peers_of(self, compressor: RoundCompressor) -> Peers:
        """The peers of a compressor, with the nodes if it reduces in levels."""
        split = self.group.split
        if split is None or not compressor.traits.levels:
            return self._peers
        return replace(self._peers, nodes=split.nodes)

    def _resume(self, results: dict[int, Tensor | None]) -> None:
        """Resume each generator with its result (None starts it), and start the requests of the next round."""
        requests: dict[int, Request] = {}
        with self.ledger.encoding(self.point):
            for index, result in results.items():
                generator, reduction = self._generators[index], self.reductions[index]
                try:
                    request = next(generator) if result is None else generator.send(result)
                    requests[index] = check_request(request, reduction.compressor)
                except StopIteration as stop:
                    self._aggregates[index] = check_aggregate(stop.value, reduction.x, reduction.compressor)
            self._serve(requests)

    def _serve(self, requests: dict[int, Request]) -> None:
        """Start the collectives of a round; requests of the same kind share a collective."""
        kinds: dict[tuple[Op, Level, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, request in requests.items():
            if request.op in (Op.REDUCE, Op.GATHER, Op.EXCHANGE) and len(requests) > 1:
                kind = request.op, request.level, request.tensor.dtype
                kinds.setdefault(kind, []).append((index, request.tensor))
            else:
                pending, result = start_request(request, self.group, self.sharded)
                self._record_started(pending, [(index, result)], request.level)
        for (op, level, _), members in kinds.items():
            tensors = [tensor for _, tensor in members]
            size = select_group(self.group, level).size
            if len(tensors) == 1:
                packed = tensors[0]
            elif op is Op.EXCHANGE:
                packed = torch.cat([tensor.view(size, tensor.numel() // size) for tensor in tensors], dim=1)
            else:
                packed = torch.cat([tensor.view(-1) for tensor in tensors])
            pending, result = start_request(Request(packed, op, level=level), self.group)
            if len(tensors) == 1:
                views = [result]
            elif op is Op.REDUCE:
                chunks = result.split([tensor.numel() for tensor in tensors])
                views = [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, tensors, strict=True)]
            elif op is Op.EXCHANGE:
                chunks = result.split([tensor.numel() // size for tensor in tensors], dim=1)
                views = [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, tensors, strict=True)]
            else:
                chunks = result.split([tensor.numel() for tensor in tensors], dim=1)
                views = [chunk.view(size, *tensor.shape) for chunk, tensor in zip(chunks, tensors, strict=True)]
            results = [(index, view) for (index, _), view in zip(members, views, strict=True)]
            self._record_started(pending, results, level)

    def _record_started(self, pending: Pending, results: list[tuple[int, Tensor]], level: Level) -> None:
        if select_group(self.group, level).size > 1:
            inside = pending.sent_bytes if level is Level.NODE else 0
            self.ledger.count_message(self.point, pending.sent_bytes, self._uncounted_raw_bytes, inside)
            self._uncounted_raw_bytes = 0
        self._pending.append(_RunningCollective(pending, results, level))

    def advance(self) -> bool:
        """Wait for the current round and start the next; return False if there is none."""
        pending, self._pending = self._pending, []
        results: dict[int, Tensor | None] = {}
        for started in pending:
            self.ledger.wait_for(self.point, started.communication)
            results.update((index, result.contiguous()) for index, result in started.results)
        self._resume(dict(sorted(results.items())))
        return bool(self._pending)

    def advance_inside_nodes(self) -> bool:
        """Run intra-node rounds until the next inter-node round has started.

        Returns:
            False if no round remains.
        """
        while self._pending and all(started.level is Level.NODE for started in self._pending):
            self.advance()
        return bool(self._pending)

    def wait(self) -> None:
        """Run the remaining rounds."""
        while self._pending:
            self.advance()

    def finish(self) -> None:
        """Wait, write the reduced tensors to the reductions, and update the compressors' states."""
        self.wait()
        with self.ledger.decoding(self.point):
            for reduction, aggregate in zip(self.reductions, self._aggregates, strict=True):
                assert aggregate is not None
                peers = self._peers_of(reduction.compressor)
                reduction.compressor.finalize(reduction.x, aggregate, reduction.state, peers)
        self._aggregates = []

    def squared_norm(self) -> float:
        """Squared norm of the reduced tensors, once all rounds have run; tensors and states are unchanged."""
        total = 0.0
        for reduction, aggregate in zip(self.reductions, self._aggregates, strict=True):
            assert aggregate is not None
            reduced = aggregate.total
            if isinstance(reduced, Approximation):
                dense = torch.empty_like(reduction.x)
                reduced.write_to(dense)
                reduced = dense
            total += sum_of_squares([reduced.reshape(-1)])
        return total

    @property
    def is_waiting(self) -> bool:
        """Whether a round is in flight whose messages have not all arrived."""
        return not all(started.communication.done() for started in self._pending)

    def arrived(self) -> bool:
        """Whether a round is in flight and waiting for it would not block."""
        return bool(self._pending) and not self.is_waiting

    def abandon(self) -> None:
        """Wait for the current round and run no others; all ranks of the group must do the same."""
        for started in self._pending:
            started.communication.wait()
        self.close()

    def close(self) -> None:
        """Drop all rounds without waiting."""
        for generator in self._generators:
            generator.close()
        self._pending = []


def start_request(request: Request, group: Group, sharded: bool = False) -> tuple[Pending, Tensor]:
    """Start the collective of a request; the returned tensor holds the result once it has completed.

    Args:
        request: the request.
        group: the reducing ranks; the request's level may select a subset.
        sharded: whether this rank reads only its own share of the result, if the request allows that.

    Raises:
        CompressorFault: when the request is for a node level, and the group has no node groups.
    """
    x, group = request.tensor, select_group(group, request.level)
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
        return group.all_to_all(received, x), received
    if request.op is Op.COLLECT:
        collected = torch.empty((group.size if group.rank == 0 else 0, *x.shape), dtype=x.dtype, device=x.device)
        return group.collect(collected, x), collected
    return (group.distribute(x) if request.op is Op.DISTRIBUTE else group.broadcast(x)), x


def select_group(group: Group, level: Level) -> Group:
    """Select the subgroup that takes part in a request at a level.

    Raises:
        CompressorFault: when the group has no node groups.
    """
    if level is Level.ALL:
        return group
    if group.split is None:
        raise CompressorFault(
            f"a compressor asks for Level.{level.name} over {group.name}, which has no node groups; it must declare "
            "SumTraits(levels=True), and look at Peers.nodes first"
        )
    return group.split.node if level is Level.NODE else group.split.across

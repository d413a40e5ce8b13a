"""Steps ``RoundCompressor`` generators over a group."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.compression.api import Aggregate, Op, Peers, Request, RoundCompressor
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, Pending, num_bytes


@dataclass
class Job:
    """One tensor to be summed.

    Args:
        compressor: the algorithm.
        x: this rank's contribution, contiguous; it belongs to the algorithm, which leaves the sum there.
        state: what the algorithm remembers of this tensor.
    """

    compressor: RoundCompressor
    x: Tensor
    state: CompressorState


class RoundsInFlight:
    """Sums under way, whose requests of one round share a collective.

    The first round starts at construction, so it overlaps with what the caller does next; the others run in ``finish``,
    which leaves the sums in the jobs' tensors.

    Args:
        jobs: the tensors, in the same order on every rank.
        group: the ranks.
        ledger, point: where the bytes are counted, and as what.
        sharded: this rank reads only its own share of the results.
        raw_bytes: what the exact sums would have sent.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        group: Group,
        ledger: Ledger,
        point: Point,
        sharded: bool = False,
        raw_bytes: int | None = None,
    ) -> None:
        self.group, self.ledger, self.point, self.sharded = group, ledger, point, sharded
        self._raw_left = sum(self._raw_bytes(job.x) for job in jobs) if raw_bytes is None else raw_bytes
        self.jobs = jobs
        self._peers = Peers(group.rank, group.size)
        self._generators: list[Generator[Request, Tensor, Aggregate]] = [
            job.compressor.rounds(job.x, job.state, self._peers) for job in jobs
        ]
        self._aggregates: list[Aggregate | None] = [None] * len(jobs)
        self._pending: list[tuple[Pending, list[tuple[int, Tensor]]]] = []
        self._resume(dict.fromkeys(range(len(jobs))))

    def _raw_bytes(self, x: Tensor) -> int:
        """Bytes of the exact sum by a ring, which is what a compressor is compared with."""
        steps = 1 if self.sharded else 2
        return steps * (self.group.size - 1) * num_bytes(x) // self.group.size

    def _resume(self, results: dict[int, Tensor | None]) -> None:
        """Hands each algorithm its result (None: lets it begin) and starts what they ask for next."""
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
        """Starts the communication of one round; small reductions share one collective."""
        kinds: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for index, request in requests.items():
            if request.op is Op.REDUCE and len(requests) > 1:
                kinds.setdefault(request.tensor.dtype, []).append((index, request.tensor))
            else:
                pending, result = start_request(request, self.group, self.sharded)
                self._started(pending, [(index, result)])
        for members in kinds.values():
            if len(members) == 1:
                self._started(self.group.all_reduce(members[0][1]), members)
                continue
            flat = torch.cat([tensor.view(-1) for _, tensor in members])
            parts = flat.split([tensor.numel() for _, tensor in members])
            views = [(i, part.view(tensor.shape)) for (i, tensor), part in zip(members, parts, strict=True)]
            self._started(self.group.all_reduce(flat), views)

    def _started(self, pending: Pending, results: list[tuple[int, Tensor]]) -> None:
        if self.group.size > 1:
            self.ledger.sent(self.point, pending.sent_bytes, self._raw_left)
            self._raw_left = 0
        self._pending.append((pending, results))

    def wait(self) -> None:
        """Runs the remaining rounds."""
        while self._pending:
            pending, self._pending = self._pending, []
            results: dict[int, Tensor | None] = {}
            for communication, members in pending:
                self.ledger.wait(self.point, communication)
                results.update(members)
            self._resume(dict(sorted(results.items())))

    def finish(self) -> None:
        """Finishes; the sums are in the jobs' tensors then, and what the compressors keep has changed."""
        self.wait()
        with self.ledger.decoding(self.point):
            for job, aggregate in zip(self.jobs, self._aggregates, strict=True):
                assert aggregate is not None
                job.compressor.finalize(job.x, aggregate, job.state, self._peers)
        self._aggregates = []

    def abandon(self) -> None:
        """Lets the round that was started end, and leaves it at that; all ranks of the group do the same."""
        for communication, _ in self._pending:
            communication.wait()
        for generator in self._generators:
            generator.close()
        self._pending = []


def start_request(request: Request, group: Group, sharded: bool = False) -> tuple[Pending, Tensor]:
    """Starts the communication of one request over a group; its result is in the tensor once it has ended.

    Args:
        request: what to communicate.
        group: the ranks.
        sharded: this rank reads only its own share of a sum whose request allows that.
    """
    x = request.tensor
    if request.op is Op.REDUCE:
        if request.shard_only and sharded and x.numel() % group.size == 0:
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
    return group.broadcast(x), x

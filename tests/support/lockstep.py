"""Runs a RoundCompressor on several pretended ranks in one process, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Op, Peers, Request, RoundCompressor
from megatron.compression.approximation import dense
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class Summed:
    """One rank's result, as tensors: the sum, and what it contributed to it."""

    total: Tensor
    local: Tensor


def run_lockstep(
    compressor: RoundCompressor,
    xs: Sequence[Tensor],
    states: Sequence[CompressorState],
    sharded: bool = False,
    taken: bool = True,
) -> list[Summed]:
    """Each rank's result; ``xs`` hold the sums afterwards, unless one is not finite or the step is not ``taken``.

    With ``sharded`` a reduce-scatter serves the requests that allow one: elements of other ranks' shares become NaN.

    Raises:
        AssertionError: when the ranks do not ask for the same things in the same order.
    """
    taken = taken and all(bool(torch.isfinite(x).all()) for x in xs)
    given = [x.clone() for x in xs]
    aggregates = _rounds(compressor, xs, states, sharded)
    results = []
    for rank, (x, aggregate) in enumerate(zip(xs, aggregates, strict=True)):
        total = dense(aggregate.total, x)
        local = given[rank] if aggregate.local is None else dense(aggregate.local, x)
        results.append(Summed(total, local))
        if taken:
            compressor.finalize(x, aggregate, states[rank], Peers(rank, len(xs)))
            torch.testing.assert_close(x, total, rtol=0, atol=0, equal_nan=True)
    return results


def _rounds(
    compressor: RoundCompressor, xs: Sequence[Tensor], states: Sequence[CompressorState], sharded: bool
) -> list[Aggregate]:
    generators = [
        compressor.rounds(x, state, Peers(rank, len(xs)))
        for rank, (x, state) in enumerate(zip(xs, states, strict=True))
    ]
    results: list[Tensor] | None = None
    while True:
        requests: list[Request] = []
        aggregates: list[Aggregate] = []
        for rank, generator in enumerate(generators):
            try:
                requests.append(next(generator) if results is None else generator.send(results[rank]))
            except StopIteration as stop:
                aggregates.append(stop.value)
        if aggregates:
            assert not requests, "some ranks ask for a round that others do not"
            return aggregates
        assert len({(r.op, r.shard_only, r.tensor.shape, r.tensor.dtype) for r in requests}) == 1
        assert all(r.tensor.is_contiguous() for r in requests)
        results = _serve(requests, sharded)


def _serve(requests: Sequence[Request], sharded: bool) -> list[Tensor]:
    tensors = [request.tensor for request in requests]
    if requests[0].op is Op.GATHER:
        return [torch.stack(tensors) for _ in tensors]
    if requests[0].op is Op.EXCHANGE:
        return [torch.stack([x[rank] for x in tensors]) for rank in range(len(tensors))]
    wanted = tensors[0].clone() if requests[0].op is Op.BROADCAST else torch.stack(tensors).sum(dim=0)
    scatter = sharded and requests[0].op is Op.REDUCE and requests[0].shard_only and wanted.numel() % len(tensors) == 0
    for rank, x in enumerate(tensors):
        x.copy_(wanted)
        if scatter:
            share = x.numel() // len(tensors)
            others = torch.ones(x.numel(), dtype=torch.bool)
            others[rank * share : (rank + 1) * share] = False
            x.view(-1)[others] = torch.nan
    return tensors

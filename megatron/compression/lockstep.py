"""Lockstep runner of a RoundCompressor on several simulated ranks in a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor
from megatron.compression.approximation import dense
from megatron.compression.options import CompressorFault
from megatron.compression.results import check_aggregate, check_request
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class RankResult:
    """A rank's result as tensors: the sum, and the rank's contribution to it."""

    total: Tensor
    local: Tensor


def run_lockstep(
    compressor: RoundCompressor,
    xs: Sequence[Tensor],
    states: Sequence[CompressorState],
    sharded: bool = False,
    step_taken: bool = True,
    nodes: tuple[tuple[int, ...], ...] = (),
    requests: list[Request] | None = None,
) -> list[RankResult]:
    """Run a compressor in lockstep, and return each rank's result.

    ``xs`` hold the sums afterwards, unless an input is nonfinite or the step is not ``step_taken``. With ``sharded``, a
    reduce-scatter serves the requests that allow it, and elements of other ranks' shares become NaN. ``nodes`` are the
    ranks by node, passed only to compressors that declare levels. The requests of rank 0 are appended to ``requests``.

    Raises:
        CompressorFault: when the ranks' sequences of requests differ, or when ``finalize`` does not leave the sum in
            ``xs``.
    """
    step_taken = step_taken and all(bool(torch.isfinite(x).all()) for x in xs)
    inputs = [x.clone() for x in xs]
    all_peers = [Peers(rank, len(xs), nodes if compressor.traits.levels else (), sharded) for rank in range(len(xs))]
    aggregates = _run_rounds(compressor, xs, states, all_peers, [] if requests is None else requests)
    results = []
    for rank, (x, aggregate) in enumerate(zip(xs, aggregates, strict=True)):
        total = dense(aggregate.total, x)
        local = inputs[rank] if aggregate.local is None else dense(aggregate.local, x)
        results.append(RankResult(total, local))
        if step_taken:
            compressor.finalize(x, aggregate, states[rank], all_peers[rank])
            share, remainder = divmod(x.numel(), len(xs))
            read = slice(rank * share, (rank + 1) * share) if sharded and not remainder else slice(x.numel())
            if not torch.allclose(x.view(-1)[read], total.view(-1)[read], rtol=0, atol=0, equal_nan=True):
                raise CompressorFault("finalize leaves something else than the sum in its input")
    return results


def _run_rounds(
    compressor: RoundCompressor,
    xs: Sequence[Tensor],
    states: Sequence[CompressorState],
    all_peers: Sequence[Peers],
    request_log: list[Request],
) -> list[Aggregate]:
    generators = [compressor.rounds(x, state, peers) for x, state, peers in zip(xs, states, all_peers, strict=True)]
    results: list[Tensor] | None = None
    while True:
        requests: list[Request] = []
        aggregates: list[Aggregate] = []
        for rank, generator in enumerate(generators):
            try:
                request = next(generator) if results is None else generator.send(results[rank])
                requests.append(check_request(request, compressor))
            except StopIteration as stop:
                aggregates.append(check_aggregate(stop.value, xs[rank], compressor))
        if aggregates:
            if requests:
                raise CompressorFault("some ranks ask for a round that others do not")
            return aggregates
        if len({(r.op, r.level, r.shard_only, r.tensor.shape, r.tensor.dtype) for r in requests}) > 1:
            raise CompressorFault("the ranks ask for different operations, levels, shapes or dtypes in one round")
        if not all(r.tensor.is_contiguous() for r in requests):
            raise CompressorFault("a request's tensor is not contiguous")
        request_log.append(requests[0])
        results = [torch.empty(0)] * len(requests)
        for members in {peers.members(requests[0].level) for peers in all_peers}:
            served = _serve([requests[rank] for rank in members], all_peers[0].sharded)
            for rank, result in zip(members, served, strict=True):
                results[rank] = result


def _serve(requests: Sequence[Request], sharded: bool) -> list[Tensor]:
    tensors = [request.tensor for request in requests]
    if requests[0].op is Op.GATHER:
        return [torch.stack(tensors) for _ in tensors]
    if requests[0].op is Op.EXCHANGE:
        return [torch.stack([x[rank] for x in tensors]) for rank in range(len(tensors))]
    if requests[0].op is Op.COLLECT:
        return [torch.stack(tensors), *(x.new_empty((0, *x.shape)) for x in tensors[1:])]
    sent = requests[0].op in (Op.BROADCAST, Op.DISTRIBUTE)
    result = tensors[0].clone() if sent else torch.stack(tensors).sum(dim=0)
    shares = sharded and requests[0].op is Op.REDUCE and requests[0].shard_only and requests[0].level is Level.ALL
    scatter = shares and result.numel() % len(tensors) == 0
    for rank, x in enumerate(tensors):
        x.copy_(result)
        if scatter:
            share = x.numel() // len(tensors)
            outside_share = torch.ones(x.numel(), dtype=torch.bool)
            outside_share[rank * share : (rank + 1) * share] = False
            x.view(-1)[outside_share] = torch.nan
    return tensors

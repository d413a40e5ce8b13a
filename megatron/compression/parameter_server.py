"""Exact sums through parameter servers: a single server rank, or every rank for its shard.

The modes ``central_ps`` and ``sharded_ps`` of AQ-SGD (Wang et al. 2022); its third mode, with compressed shards, is
``quantized-adam``.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from megatron.compression.api import Aggregate, Op, Peers, Request, RoundCompressor
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class ParameterServerConfig:
    """Exact sums of gradients through parameter servers."""

    server: Literal["central", "sharded"] = opt(
        "sharded",
        "central: the first replica, whose link carries the gradients of all replicas; sharded: each replica, "
        "for its share",
    )


class ParameterServer(RoundCompressor):
    """Sum over all ranks, added on the servers in the order of the ranks."""

    config: ParameterServerConfig

    def __init__(self, config: ParameterServerConfig) -> None:
        super().__init__(config)
        self.traits = replace(self.traits, gathers=config.server == "central")

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        if self.config.server == "central":
            received = yield Request(x, Op.COLLECT)
            if received.shape[0]:
                x.copy_(_sum_rows(received))
            return Aggregate((yield Request(x, Op.DISTRIBUTE)), None)
        flat = x.view(-1)
        shard_size = -(-flat.numel() // peers.size)
        padded = flat.new_zeros(shard_size * peers.size)
        padded[: flat.numel()] = flat
        received = yield Request(padded.view(peers.size, shard_size), Op.EXCHANGE)
        shard_sum = _sum_rows(received)
        if peers.sharded and padded.numel() == flat.numel():
            flat[peers.rank * shard_size : (peers.rank + 1) * shard_size] = shard_sum
            return Aggregate(x, None)
        gathered = yield Request(shard_sum, Op.GATHER)
        return Aggregate(gathered.view(-1)[: flat.numel()].view(x.shape), None)


def _sum_rows(rows: Tensor) -> Tensor:
    """Sum of the rows, added in order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def register(registry: Registry) -> None:
    """Register ``parameter-server``."""
    registry.register(
        "parameter-server",
        Registration(
            ParameterServerConfig,
            rounds=ParameterServer,
            points=frozenset({Point.DP_GRAD}),
            no_feedback="leaves no error",
            alternatives=("none",),
            source="AQ-SGD's --dp-mode, Wang et al. 2022",
            example="dp-grad=parameter-server,server=central",
        ),
    )

"""Parameter servers: the plain sum, and who sends how much."""

from __future__ import annotations

import pytest
import torch

from megatron.compression.api import Op, Request
from megatron.compression.lockstep import run_lockstep
from megatron.compression.parameter_server import ParameterServer, ParameterServerConfig
from megatron.compression.state import CompressorState


@pytest.mark.parametrize("server", ["central", "sharded"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(server: str, sharded: bool, size: int) -> None:
    compressor = ParameterServer(ParameterServerConfig(server))  # type: ignore[arg-type]
    for shape in ((0,), (1,), (7,), (2, 3, 5), (12 * size,)):
        xs = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        wanted = xs[0].clone()
        for x in xs[1:]:
            wanted += x
        results = run_lockstep(compressor, xs, [CompressorState() for _ in xs], sharded)
        share = wanted.numel() // size
        alone = sharded and server == "sharded" and wanted.numel() % size == 0
        for rank, result in enumerate(results):
            read = slice(rank * share, (rank + 1) * share) if alone else slice(None)
            assert torch.equal(result.total.view(-1)[read], wanted.view(-1)[read])


def _asked(server: str, sharded: bool = False) -> list[Request]:
    asked: list[Request] = []
    xs = [torch.ones(12) for _ in range(4)]
    compressor = ParameterServer(ParameterServerConfig(server))  # type: ignore[arg-type]
    run_lockstep(compressor, xs, [CompressorState() for _ in xs], sharded, requests=asked)
    return asked


def test_a_central_server_receives_and_sends_whole_gradients() -> None:
    asked = _asked("central")
    assert [(request.op, request.tensor.numel()) for request in asked] == [(Op.COLLECT, 12), (Op.DISTRIBUTE, 12)]


def test_sharded_servers_exchange_parts_and_send_sums_where_they_are_read() -> None:
    exchange = (Op.EXCHANGE, (4, 3))
    assert [(request.op, request.tensor.shape) for request in _asked("sharded")] == [exchange, (Op.GATHER, (3,))]
    assert [(request.op, request.tensor.shape) for request in _asked("sharded", sharded=True)] == [exchange]

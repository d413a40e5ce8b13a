"""Parameter servers: the plain sum, and the messages of each rank."""

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
def test_every_rank_gets_the_sum_in_rank_order(server: str, sharded: bool, size: int) -> None:
    compressor = ParameterServer(ParameterServerConfig(server))  # type: ignore[arg-type]
    for shape in ((0,), (1,), (7,), (2, 3, 5), (12 * size,)):
        xs = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        expected = xs[0].clone()
        for x in xs[1:]:
            expected += x
        results = run_lockstep(compressor, xs, [CompressorState() for _ in xs], sharded)
        share = expected.numel() // size
        alone = sharded and server == "sharded" and expected.numel() % size == 0
        for rank, result in enumerate(results):
            read = slice(rank * share, (rank + 1) * share) if alone else slice(None)
            assert torch.equal(result.total.view(-1)[read], expected.view(-1)[read])


def _requests(server: str, sharded: bool = False) -> list[Request]:
    requests: list[Request] = []
    xs = [torch.ones(12) for _ in range(4)]
    compressor = ParameterServer(ParameterServerConfig(server))  # type: ignore[arg-type]
    run_lockstep(compressor, xs, [CompressorState() for _ in xs], sharded, requests=requests)
    return requests


def test_a_central_server_receives_and_sends_whole_gradients() -> None:
    requests = _requests("central")
    assert [(request.op, request.tensor.numel()) for request in requests] == [(Op.COLLECT, 12), (Op.DISTRIBUTE, 12)]


def test_sharded_servers_exchange_shares_and_gather_sums_unless_sharded() -> None:
    exchange = (Op.EXCHANGE, (4, 3))
    assert [(request.op, request.tensor.shape) for request in _requests("sharded")] == [exchange, (Op.GATHER, (3,))]
    assert [(request.op, request.tensor.shape) for request in _requests("sharded", sharded=True)] == [exchange]

"""Stochastic rounding in tensor-parallel collectives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.parallel.tensor.collectives import TensorComm


def _gathered(
    name: str, iteration: int, micro_batch: int = 0, layer: str = "0.mlp", point: Point = Point.TP_FWD
) -> Tensor:
    """Gathered activations under sequence parallelism."""
    compress = [f"{direction}={name},rounding=stochastic" for direction in ("tp-forward", "tp-backward")]
    specs = read_specs(compress, Registry(BUILTIN), RunLength(10))
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan(specs))
    comm.begin_step(iteration)
    comm.seeds.micro_batch = micro_batch
    return comm.at(layer).start_gather(torch.linspace(-1, 1, 512).view(8, 1, 64), point).wait()


@pytest.mark.parametrize("name", ["fixpoint,bits=2", "float8"])
def test_each_gather_draws_different_noise(name: str) -> None:
    """With equal noise, errors would repeat instead of averaging out."""
    first = _gathered(name, 3)
    assert torch.equal(first, _gathered(name, 3))
    assert not torch.equal(first, _gathered(name, 4))
    assert not torch.equal(first, _gathered(name, 3, micro_batch=1))
    assert not torch.equal(first, _gathered(name, 3, layer="1.mlp"))
    assert not torch.equal(first, _gathered(name, 3, point=Point.TP_BWD))

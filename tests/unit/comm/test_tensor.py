"""Tensor-parallel collectives: the noise of stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.comm.tensor import TensorComm
from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.topology.topology import single_process


def _gathered(name: str, iteration: int) -> Tensor:
    """What arrives of the same activations in an iteration under sequence parallelism."""
    specs = read_specs([f"tp-forward={name},rounding=stochastic"], Registry(BUILTIN), RunLength(10))
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan(specs))
    comm.begin(iteration)
    return comm.start_gather(torch.linspace(-1, 1, 512).view(8, 1, 64), Point.TP_FWD).wait()


@pytest.mark.parametrize("name", ["fixpoint,bits=2", "float8"])
def test_each_iteration_draws_other_noise_for_a_gather(name: str) -> None:
    """With the same noise in each, an error would return in each, and not vanish in the mean."""
    assert not torch.equal(_gathered(name, 3), _gathered(name, 4))
    assert torch.equal(_gathered(name, 3), _gathered(name, 3))

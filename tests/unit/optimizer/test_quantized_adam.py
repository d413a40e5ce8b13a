"""Quantized Adam against a plain loop in fp64 written from its formulas (1-bit Adam, algorithm 1, at b bits)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.lockstep import run_lockstep
from megatron.compression.quantized_adam import QuantizedAdam, QuantizedAdamConfig
from megatron.compression.state import CompressorState
from megatron.config.model import LM_LOSS
from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.optimizer.loss_scale import ConstantLossScale
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor.shards import ParamSpec

RANKS, SIZE, WARMUP, STEPS = 3, 24, 5, 25
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1


def _gradient(rank: int, step: int, p: Tensor) -> Tensor:
    """Of rank's own quadratic, with noise, as its share of the mean."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    target = torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (rank + 1)
    noise = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return (p - target + 0.3 * noise) / RANKS


def _plain_loop(bits: int) -> Tensor:
    quantizer = Quantizer(FixpointConfig(bits=bits))

    def q(x: Tensor) -> Tensor:
        return quantizer.decode(quantizer.encode(x, None), x.shape).double()

    part = SIZE // RANKS
    p = torch.zeros(SIZE, dtype=torch.float64)
    moment, variance, shared = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
    worker_error = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(RANKS)]
    server_error = [torch.zeros(part, dtype=torch.float64) for _ in range(RANKS)]
    for step in range(STEPS):
        grads = [_gradient(rank, step, p) for rank in range(RANKS)]
        if step < WARMUP:
            g = sum(grads, torch.zeros(SIZE, dtype=torch.float64))
            variance = BETA2 * variance + (1 - BETA2) * g * g
        else:
            summed = torch.zeros(SIZE, dtype=torch.float64)
            for rank in range(RANKS):
                own = BETA1 * shared / RANKS + (1 - BETA1) * grads[rank] + worker_error[rank]
                # The part that a rank serves carries its server's error, too.
                own[rank * part : (rank + 1) * part] += server_error[rank]
                sent = torch.cat([q(chunk) for chunk in own.split(part)])
                worker_error[rank] = own - sent
                summed += sent
            new = torch.cat([q(chunk) for chunk in summed.split(part)])
            for rank in range(RANKS):
                place = slice(rank * part, (rank + 1) * part)
                server_error[rank] = summed[place] - new[place]
            g = (new - BETA1 * shared) / (1 - BETA1)
            shared = new
        moment = BETA1 * moment + (1 - BETA1) * g
        frozen_or_now = min(step + 1, WARMUP)
        hat = moment / (1 - BETA1 ** (step + 1))
        root = (variance / (1 - BETA2**frozen_or_now)).sqrt() + EPS
        p = p - LR * DECAY * p - LR * hat / root
    return p


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_plain_loop(bits: int) -> None:
    param = nn.Parameter(torch.zeros(1, SIZE, dtype=torch.float64))
    buffer = FlatBuffer([("w", "w", ParamSpec((1, SIZE)), param)], torch.float64, single_process().dp, None)
    settings = OptimizerConfig(lr=LR, adam_beta1=BETA1, adam_beta2=BETA2, adam_eps=EPS, clip_grad=0.0)
    plan, scale = CompressionPlan({}), ConstantLossScale(1.0)
    optimizer = Optimizer([buffer], single_process(), settings, scale, plan, Ledger(), sharded=False)
    compressor = QuantizedAdam(QuantizedAdamConfig(bits=bits, beta=BETA1))
    states = [CompressorState() for _ in range(RANKS)]
    for step in range(STEPS):
        grads = [_gradient(rank, step, param.detach().flatten()) for rank in range(RANKS)]
        on = step >= WARMUP
        total = run_lockstep(compressor, grads, states)[0].total if on else torch.stack(grads).sum(dim=0)
        for state in states:
            state.commit()
        buffer.grads_flat.copy_(total)
        optimizer.step({LM_LOSS: (1.0, 1.0)}, step, lr=LR, weight_decay=DECAY, freeze_variance=on)
    assert optimizer.frozen_at == WARMUP
    torch.testing.assert_close(param.detach().flatten(), _plain_loop(bits), rtol=1e-6, atol=1e-9)


def test_rows_that_had_no_gradient_in_the_warm_up_do_not_explode() -> None:
    """Their second moment is frozen at zero in the published code, and the first gradient is divided by epsilon."""
    param = nn.Parameter(torch.zeros(2, 4))
    buffer = FlatBuffer([("w", "w", ParamSpec((2, 4)), param)], torch.float32, single_process().dp, None)
    settings = OptimizerConfig(lr=LR, clip_grad=0.0)
    parts: list[Any] = [CompressionPlan({}), Ledger()]
    optimizer = Optimizer([buffer], single_process(), settings, ConstantLossScale(1.0), *parts, sharded=False)
    for step in range(6):
        buffer.grads_flat.copy_(torch.tensor([1.0] * 4 + [float(step >= 3)] * 4))
        optimizer.step({LM_LOSS: (1.0, 1.0)}, step, lr=LR, weight_decay=0.0, freeze_variance=step >= 3)
    assert float(param.detach().abs().max()) < 10 * LR

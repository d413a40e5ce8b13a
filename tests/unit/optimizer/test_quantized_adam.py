"""Quantized Adam against a plain loop in fp64 written from its formulas (1-bit Adam, algorithm 1, at b bits)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.lockstep import run_lockstep
from megatron.compression.quantized_adam import QuantizedAdam, QuantizedAdamConfig
from megatron.compression.state import CompressorState
from tests.unit.optimizer.support import build_run

RANKS, SIZE, WARMUP, STEPS = 3, 24, 4, 12
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1


def _gradient(rank: int, step: int, p: Tensor) -> Tensor:
    """Gradient of the rank's quadratic, with noise, as its share of the mean."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    target = torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (rank + 1)
    noise = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return (p - target + 0.3 * noise) / RANKS


def _plain_loop(bits: int) -> Tensor:
    quantizer = Quantizer(FixpointConfig(bits=bits))

    def q(x: Tensor) -> Tensor:
        return quantizer.decode(quantizer.encode(x, None), x.shape).double()

    size = SIZE // RANKS
    p = torch.zeros(SIZE, dtype=torch.float64)
    moment, variance, shared = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
    worker_error = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(RANKS)]
    server_error = [torch.zeros(size, dtype=torch.float64) for _ in range(RANKS)]
    for step in range(STEPS):
        grads = [_gradient(rank, step, p) for rank in range(RANKS)]
        if step < WARMUP:
            g = sum(grads, torch.zeros(SIZE, dtype=torch.float64))
            variance = BETA2 * variance + (1 - BETA2) * g * g
        else:
            summed = torch.zeros(SIZE, dtype=torch.float64)
            for rank in range(RANKS):
                message = BETA1 * shared / RANKS + (1 - BETA1) * grads[rank] + worker_error[rank]
                # The numbers that a rank serves carry its server error, too.
                message[rank * size : (rank + 1) * size] += server_error[rank]
                sent = torch.cat([q(chunk) for chunk in message.split(size)])
                worker_error[rank] = message - sent
                summed += sent
            new = torch.cat([q(chunk) for chunk in summed.split(size)])
            for rank in range(RANKS):
                rows = slice(rank * size, (rank + 1) * size)
                server_error[rank] = summed[rows] - new[rows]
            g = (new - BETA1 * shared) / (1 - BETA1)
            shared = new
        moment = BETA1 * moment + (1 - BETA1) * g
        frozen_or_now = min(step + 1, WARMUP)
        hat = moment / (1 - BETA1 ** (step + 1))
        root = (variance / (1 - BETA2**frozen_or_now)).sqrt() + EPS
        p = p - LR * DECAY * p - LR * hat / root
    return p


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_steps_match_a_plain_loop(bits: int) -> None:
    values = {"w": torch.zeros(1, SIZE, dtype=torch.float64)}
    run = build_run(values, torch.float64, lr=LR, adam_beta1=BETA1, adam_beta2=BETA2, adam_eps=EPS)
    weight = run.params["w"].detach().flatten()
    compressor = QuantizedAdam(QuantizedAdamConfig(bits=bits, beta=BETA1))
    states = [CompressorState() for _ in range(RANKS)]
    for step in range(STEPS):
        grads = [_gradient(rank, step, weight) for rank in range(RANKS)]
        on = step >= WARMUP
        total = run_lockstep(compressor, grads, states)[0].total if on else torch.stack(grads).sum(dim=0)
        for state in states:
            state.commit()
        run.buffer.grads_flat.copy_(total)
        run.step(step, lr=LR, weight_decay=DECAY, freezes_variance=on)
    assert run.optimizer.frozen_at == WARMUP
    torch.testing.assert_close(weight, _plain_loop(bits), rtol=1e-6, atol=1e-9)


def test_rows_without_gradients_in_the_warm_up_do_not_explode() -> None:
    """In the published code their second moment is frozen at zero, and the first gradient is divided by epsilon."""
    run = build_run({"w": torch.zeros(2, 4)}, torch.float32, lr=LR)
    for step in range(6):
        run.buffer.grads_flat.copy_(torch.tensor([1.0] * 4 + [float(step >= 3)] * 4))
        run.step(step, lr=LR, weight_decay=0.0, freezes_variance=step >= 3)
    assert float(run.params["w"].detach().abs().max()) < 10 * LR

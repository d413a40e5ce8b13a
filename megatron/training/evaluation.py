"""The mean loss over an evaluation's samples."""

from __future__ import annotations

import torch

from megatron.compression.points import Point
from megatron.data.loader import MicroBatches
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step, take_batches


def evaluate(engines: Engines, batches: MicroBatches, rounds: int, micro_batches: int) -> float:
    """Computes the mean loss in nats per token over ``rounds`` global batches; the same on every rank.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        rounds: number of global batches.
        micro_batches: this rank's micro-batches in each of them.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        taken = take_batches(batches, micro_batches, engines.topology.device)
        totals += torch.tensor(evaluation_step(engines, taken), dtype=torch.float64)
    pending = engines.topology.control.all_reduce(totals)
    engines.ledger.sent(Point.CONTROL, pending.sent_bytes)
    pending.wait()
    loss_sum, tokens = totals.tolist()
    return loss_sum / tokens if tokens else 0.0

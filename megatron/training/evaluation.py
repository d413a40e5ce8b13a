"""Mean losses over an evaluation's samples."""

from __future__ import annotations

import torch

from megatron.compression.points import Point
from megatron.data.loader import MicroBatches
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step, take_batches


def evaluate(engines: Engines, batches: MicroBatches, rounds: int, micro_batches: int) -> dict[str, float]:
    """Computes the mean of each loss in nats, by name, over ``rounds`` global batches; the same on every rank.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        rounds: number of global batches.
        micro_batches: this rank's micro-batches in each of them.
    """
    names = engines.config.model.loss_names
    totals = torch.zeros((len(names), 2), dtype=torch.float64)
    for _ in range(rounds):
        taken = take_batches(batches, micro_batches, engines.topology.device)
        sums = evaluation_step(engines, taken)
        totals += torch.tensor([sums[name] for name in names], dtype=torch.float64)
    pending = engines.topology.control.all_reduce(totals)
    engines.ledger.sent(Point.CONTROL, pending.sent_bytes)
    pending.wait()
    return {name: total / count if count else 0.0 for name, (total, count) in zip(names, totals.tolist(), strict=True)}

"""Mean losses over an evaluation's samples, and what a task head says of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.data.loader import MicroBatches
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step, take_batches


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation, the same on every rank.

    Args:
        losses: mean losses by name, nats.
        outputs_nc: fp64, what a task head says of each draw; None for a language model.
    """

    losses: Mapping[str, float]
    outputs_nc: Tensor | None = None


def evaluate(engines: Engines, batches: MicroBatches, rounds: int, micro_batches: int, first_draw: int) -> Evaluated:
    """Computes the mean of each loss over ``rounds`` global batches.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        rounds: number of global batches.
        micro_batches: this rank's micro-batches in each of them.
        first_draw: number of the first draw.
    """
    config, found = engines.config, list[tuple[Tensor, Tensor]]()
    names = config.model.loss_names
    totals = torch.zeros((len(names), 2), dtype=torch.float64)
    for _ in range(rounds):
        taken = take_batches(batches, micro_batches, engines.topology.device)
        sums = evaluation_step(engines, taken, found)
        totals += torch.tensor([sums[name] for name in names], dtype=torch.float64)
    _sum(engines, totals)
    losses = {
        name: total / count if count else 0.0 for name, (total, count) in zip(names, totals.tolist(), strict=True)
    }
    if config.model.predicts_words:
        return Evaluated(losses)
    # Each draw is one rank's, so the sum with the others' zeros is exact.
    outputs_nc = torch.zeros(
        (rounds * config.training.global_batch_size, config.model.num_outputs), dtype=torch.float64
    )
    for draws_b, values_bc in found:
        outputs_nc[draws_b - first_draw] = values_bc.double().cpu()
    _sum(engines, outputs_nc)
    return Evaluated(losses, outputs_nc)


def _sum(engines: Engines, totals: Tensor) -> None:
    pending = engines.topology.control.all_reduce(totals)
    engines.ledger.sent(Point.CONTROL, pending.sent_bytes)
    pending.wait()

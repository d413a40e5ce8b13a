"""An oracle of gradients that shares nothing with their computation: how the logged objective falls along its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from megatron.data.batch import Batch
from megatron.training.assembly import Engines
from megatron.training.step import take_batches, train_step
from tests.support.tiny import merge, tiny_batches, tiny_engines

Changes = Mapping[str, Mapping[str, Any]]

PLAIN: dict[str, dict[str, Any]] = {
    "precision": {"fp64": True},
    "model": {"num_layers": 2, "hidden_size": 16, "seq_length": 6},
    "optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 0.0, "weight_decay": 0.0},
    "training": {"global_batch_size": 6},
}
"""Steps move the parameters by the learning rate times the gradient. No number of tokens is a power of two."""

RATE = 1e-6


def plain_engines(changes: Changes, masked: bool) -> Engines:
    """Engines of this rank for such steps; ``masked``: loss masks exclude some labels."""
    return tiny_engines(merge(PLAIN, changes, {"data": {"eod_mask_loss": masked}}))


def descent_ratio(changes: Changes, masked: bool) -> float:
    """The fall of the sum of all logged losses in a step along the gradient, over the rate times the squared norm of
    the gradient: 1 where the gradient is that of the sum. A collective call when there is a process group.

    Exact to the square of the rate: between two steps the mean of the squared norm weighs 3 : 1. The first step moves
    nothing; losses of experts know its choices in the second step, and those of the second in the third.
    """
    engines = plain_engines(changes, masked)
    batches = _batches(engines, masked)
    steps = [train_step(engines, batches, number, rate, 0.0) for number, rate in enumerate((0.0, RATE, 0.0))]
    (before, norm), (after, norm_after) = ((sum(s.losses.values()), s.grad_norm) for s in steps[1:])
    assert norm is not None
    assert norm_after is not None
    return (before - after) / (RATE * (0.75 * norm**2 + 0.25 * norm_after**2))


def _batches(engines: Engines, masked: bool) -> list[Batch]:
    config, topology = engines.config, engines.topology
    count = config.training.global_batch_size // (config.training.micro_batch_size * topology.layout.dp)
    step_batches = take_batches(islice(tiny_batches(config, topology, masked), count), count, topology.device)
    return step_batches if config.model.predicts_words else [_of_task(engines, batch, masked) for batch in step_batches]


def _of_task(engines: Engines, batch: Batch, masked: bool) -> Batch:
    """Sequences of a task: each sample has at least one, and the first counts; where some samples are masked,
    each third one does not."""
    model, rows = engines.config.model, batch.draw_ids_b.tolist()
    each = model.sequences_per_sample
    labels = [0.3 * row if model.task_head == "regression" else row // each % 2 for row in rows]
    counts = [row % each == 0 and not (masked and row // each % 3 == 1) for row in rows]
    return replace(
        batch,
        labels_bs=torch.tensor(labels, dtype=torch.float64 if model.task_head == "regression" else None).unsqueeze(1),
        loss_mask_bs=torch.tensor(counts).float().unsqueeze(1),
        lengths_b=torch.tensor([model.seq_length - row % 4 for row in rows]),
    )

"""Losses and gradients are means over the global batch, whatever the micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.models.losses import Targets
from megatron.training.step import train_step
from tests.support.tiny import T5, merge, tiny_engines, tiny_pairs, tiny_spans
from tests.unit.models.reference import context_of, split_batches

BERT: dict[str, Any] = {"model": {"model_type": "bert"}}
CLASSIFIER = {"model": {"model_type": "bert", "task_head": "classification", "task_classes": 3}}


def _losses(changes: dict[str, Any], batches: list[Batch], size: int) -> tuple[dict[str, float], float | None]:
    training = {"micro_batch_size": size // len(batches), "global_batch_size": size}
    engines = tiny_engines(merge(changes, {"training": training, "precision": {"fp64": True}}))
    metrics = train_step(engines, batches, 0, 1e-3, 0.0)
    return dict(metrics.losses), metrics.grad_norm


def _classified_pairs() -> dict[str, Tensor]:
    """Four samples, the last of which fills up the batch and does not count."""
    pairs, ids = tiny_pairs(range(4), 16), torch.arange(4).unsqueeze(1)
    lengths_b = (pairs["segment_ids_bs"] == 0).sum(dim=1)
    return {**pairs, "labels_bs": ids % 3, "loss_mask_bs": (ids < 3).float(), "lengths_b": lengths_b}


@pytest.mark.parametrize(
    ("changes", "tensors", "counted"),
    [(BERT, tiny_pairs(range(4), 16), 4), (T5, tiny_spans(range(4), 16, 8), 4), (CLASSIFIER, _classified_pairs(), 3)],
    ids=["bert", "t5", "classifier"],
)
def test_losses_and_gradients_are_means_over_the_global_batch(
    changes: dict[str, Any], tensors: dict[str, Tensor], counted: int
) -> None:
    losses, norm = _losses(changes, split_batches(tensors, 4, 4), 4)
    for size in {4, counted}:
        split_losses, split_norm = _losses(changes, split_batches(tensors, size, 1), size)
        assert split_losses == pytest.approx(losses, rel=1e-12)
        assert split_norm == pytest.approx(norm, rel=1e-12)
    engines = tiny_engines(merge(changes, {"precision": {"fp64": True}}))
    (stage,) = engines.stages
    for buffer in engines.buffers:
        buffer.grads_flat.zero_()
    targets = Targets(
        tensors["labels_bs"], tensors["loss_mask_bs"], tensors.get("order_b"), lengths_b=tensors.get("lengths_b")
    )
    objective = stage.loss(stage(tensors["tokens_bs"], context_of(tensors)), targets, stage.counts(targets)).objective
    objective.backward()
    assert sum(losses.values()) == pytest.approx(objective.item(), rel=1e-12)
    gradient = torch.cat([buffer.grads_flat for buffer in engines.buffers])
    assert norm == pytest.approx(float(gradient.norm()), rel=1e-12)


def test_a_batch_without_masked_words_trains_on_the_sentence_order_alone() -> None:
    """Each sample has an order, so no batch is without labels."""
    batches = [
        replace(batch, loss_mask_bs=torch.zeros(1, 16)) for batch in split_batches(tiny_pairs(range(4), 16), 4, 1)
    ]
    losses, norm = _losses(BERT, batches, 4)
    assert losses["lm loss"] == 0.0
    assert losses["sop loss"] > 0.0
    assert norm is not None
    assert norm > 0.0

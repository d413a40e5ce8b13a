"""Mean losses over an evaluation's samples, and task-head outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.user_text import short_names
from megatron.compression.points import Point
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.data.build import Dataset
from megatron.data.source import BlendedDataset
from megatron.data.whole_batches import PaddedSource, WholeBatches
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step, take_batches


@dataclass(frozen=True)
class EvaluationSet:
    """A data set with separately reported losses.

    Args:
        name: name in the log; empty for a single set.
        dataset: the samples.
        num_batches: global batches of each evaluation.
        batch_size: samples of a global batch.
    """

    name: str
    dataset: Dataset
    num_batches: int
    batch_size: int

    @property
    def samples(self) -> int:
        """Samples of each evaluation, without the padding of its last batch."""
        drawn = self.num_batches * self.batch_size
        return min(drawn, self.dataset.real_samples) if isinstance(self.dataset, PaddedSource) else drawn


def validation_sets(config: RunConfig, dataset: Dataset | None) -> list[EvaluationSet]:
    """The sets to evaluate: the validation set's members under --multiple-validation-sets, else the set itself.

    Raises:
        UserError: when --full-validation reads a set without samples.
    """
    validation, batch_size = config.validation, config.training.global_batch_size
    if dataset is None or not validation.eval_iters:
        return []
    members = {"": dataset}
    if config.data.multiple_validation_sets and isinstance(dataset, BlendedDataset):
        names = short_names([member.name for member in dataset.datasets])
        members = dict(zip(names, dataset.datasets, strict=True))
    if not validation.full_validation:
        return [EvaluationSet(name, member, validation.eval_iters, batch_size) for name, member in members.items()]
    for name, member in members.items():
        if not len(member):
            files = member.datasets if isinstance(member, BlendedDataset) else [member]
            file_names = ", ".join(str(getattr(file, "name", "")) for file in files)
            raise UserError(
                f"--full-validation: the validation set {name or file_names} has no sample of --seq-length "
                f"{config.model.seq_length}: give it more text, leave it out, or evaluate nothing: --eval-iters 0"
            )
    whole_batches = {name: WholeBatches(member, batch_size) for name, member in members.items()}
    return [
        EvaluationSet(name, member, len(member) // batch_size, batch_size) for name, member in whole_batches.items()
    ]


def test_sets(config: RunConfig, dataset: Dataset | None) -> list[EvaluationSet]:
    """The test set, unless evaluation is off."""
    num_batches = config.validation.eval_iters
    if not dataset or not num_batches:
        return []
    return [EvaluationSet("", dataset, num_batches, config.training.global_batch_size)]


@dataclass(frozen=True)
class EvaluationResult:
    """Losses and outputs of an evaluation, the same on every rank.

    Args:
        losses: mean losses by name, nats.
        outputs_nc: fp64 task-head output of each draw; None for a language model.
    """

    losses: Mapping[str, float]
    outputs_nc: Tensor | None = None


def evaluate(
    engines: Engines, batches: Iterator[Batch], num_batches: int, micro_batches: int, first_draw: int
) -> EvaluationResult:
    """Compute the mean of each loss over ``num_batches`` global batches.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        num_batches: number of global batches.
        micro_batches: number of this rank's micro-batches in each of them.
        first_draw: number of the first draw.
    """
    config, outputs = engines.config, list[tuple[Tensor, Tensor]]()
    names = config.model.loss_names
    totals = torch.zeros((len(names), 2), dtype=torch.float64)
    with engines.optimizer.publisher.exact_parameters():
        for _ in range(num_batches):
            step_batches = take_batches(batches, micro_batches, engines.topology.device)
            sums = evaluation_step(engines, step_batches, outputs)
            totals += torch.tensor([sums[name] for name in names], dtype=torch.float64)
    _all_reduce(engines, totals)
    losses = {
        name: total / count if count else 0.0 for name, (total, count) in zip(names, totals.tolist(), strict=True)
    }
    if config.model.predicts_words:
        return EvaluationResult(losses)
    # Each draw belongs to a single rank, so the sum with the other ranks' zeros is exact.
    outputs_nc = torch.zeros(
        (num_batches * config.training.global_batch_size, config.model.num_outputs), dtype=torch.float64
    )
    for draws_b, values_bc in outputs:
        outputs_nc[draws_b - first_draw] = values_bc.double().cpu()
    _all_reduce(engines, outputs_nc)
    return EvaluationResult(losses, outputs_nc)


def _all_reduce(engines: Engines, totals: Tensor) -> None:
    pending = engines.topology.control.all_reduce(totals)
    engines.ledger.count_message(Point.CONTROL, pending.sent_bytes)
    pending.wait()

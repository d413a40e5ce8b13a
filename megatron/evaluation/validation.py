"""Validation loss of a run's checkpoints, on the same samples for all."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from megatron.base.errors import UserError
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.data.build import Dataset, build_datasets
from megatron.data.loader import MicroBatches
from megatron.inference.model import LoadedModel
from megatron.models.context import ForwardContext

_PATHS = {"data_path", "train_data_path", "valid_data_path", "test_data_path"}


def data_of(config: RunConfig, flags: DataConfig, explicit: Collection[str]) -> DataConfig:
    """Data section of a run, with overrides from flags.

    Args:
        config: configuration of the run.
        flags: values of the flags.
        explicit: dotted names of the flags that were set explicitly.
    """
    changes = {name: getattr(flags, name) for name in vars(flags) if f"data.{name}" in explicit}
    saved = config.data
    if _PATHS & set(changes):
        saved = replace(saved, data_path=[], train_data_path=[], valid_data_path=[], test_data_path=[], mock_data=False)
    return replace(saved, **changes)


def open_samples(config: RunConfig, data: DataConfig, samples: int, model: LoadedModel) -> Dataset:
    """Open the first validation samples of a run.

    Args:
        config: configuration of the run.
        data: data section.
        samples: number of samples.
        model: model whose tokenizer determines the vocabulary.

    Raises:
        UserError: when the data cannot be read, or there are no samples.
    """
    _, valid, _ = build_datasets(
        data,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        train_valid_test_num_samples=(1, samples, 1),
        eod_token=model.tokenizer.eod,
        vocab_size=model.tokenizer.vocab_size,
        check_tokens=model.topology.rank == 0,
    )
    if valid is None:
        raise UserError("there is no validation data: give --valid-data-path, or a second share of --split")
    return valid


@torch.no_grad()
def mean_loss(model: LoadedModel, dataset: Dataset, samples: int, batch: int) -> float:
    """Compute the mean loss in nats per token over the first samples; the same on every rank.

    Args:
        model: the model, on every rank; replicas share the samples.
        dataset: dataset of the samples.
        samples: number of samples; a multiple of the number of replicas.
        batch: maximum number of samples in a forward pass.
    """
    topology = model.topology
    replicas = topology.layout.dp
    size = math.gcd(samples // replicas, batch)
    batches = MicroBatches(
        dataset, consumed_samples=0, micro_batch_size=size, dp_rank=topology.dp.rank, dp_size=replicas, num_workers=0
    )
    sums = torch.zeros(2, dtype=torch.float64)
    for _ in range(samples // (size * replicas)):
        micro_batch = next(batches).to(model.device)
        assert micro_batch.tokens_bs is not None
        assert micro_batch.labels_bs is not None
        assert micro_batch.loss_mask_bs is not None
        positions = micro_batch.position_ids_bs if dataset.resets_positions else None
        context = ForwardContext(position_ids_bs=positions, segment_ids_bs=micro_batch.segment_ids_bs)
        x_sbh = model.hidden(micro_batch.tokens_bs, context)
        if x_sbh is None:
            continue
        _, losses_bs = model.stage.token_losses(x_sbh, micro_batch.labels_bs, micro_batch.loss_mask_bs)
        if topology.tp.rank == 0:
            mask_bs = micro_batch.loss_mask_bs.double()
            sums += torch.stack([(losses_bs.double() * mask_bs).sum(), mask_bs.sum()]).cpu()
    model.all_reduce(sums)
    return float(sums[0] / sums[1])

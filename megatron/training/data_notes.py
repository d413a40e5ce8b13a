"""Notes on data sets that are small for the run, and on how often they are read."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run import RunConfig
from megatron.data.build import Dataset, Datasets
from megatron.data.source import BlendedDataset
from megatron.training.evaluation import EvaluationSet, test_sets, validation_sets


def data_notes(config: RunConfig, datasets: Datasets) -> list[str]:
    """Return a note on each data set that is missing, or smaller than the number of samples drawn from it.

    Args:
        config: the resolved configuration.
        datasets: training, validation and test set.
    """
    train, valid, test = datasets
    validation, size = config.validation, config.training.global_batch_size
    notes: list[str] = []
    if train is not None and not validation.skip_train:
        notes += _short(train, size, "training set")
        files = [(len(train), train.epoch_samples, "")]
        if isinstance(train, BlendedDataset):
            pairs = zip(train.datasets, train.draws, strict=True)
            files = [(draws, member.epoch_samples, f" of {member.name}") for member, draws in pairs]
        repeated = [
            f"{draws / max(samples, 1):.1f} epochs of {samples:,} samples{of_file}"
            for draws, samples, of_file in files
            if draws > max(samples, 1)
        ]
        if repeated:
            notes.append(f"training repeats its data: {', '.join(repeated)}")
    if not validation.eval_iters:
        return notes
    if valid is None and (config.data.data_path or config.data.mock_data):
        notes.append(
            f"--split {config.data.split} leaves no text for validation, so nothing is evaluated; raise its second "
            "share, give --valid-data-path, or turn evaluation off with --eval-iters 0"
        )
    elif valid is None:
        notes.append(
            "there is no --valid-data-path, so nothing is evaluated; give one, or turn evaluation off with "
            "--eval-iters 0"
        )
    for evaluation_set in [] if validation.full_validation else validation_sets(config, valid):
        notes += _evaluation_notes(evaluation_set, f"validation set{evaluation_set.name and ' '}{evaluation_set.name}")
    for evaluation_set in test_sets(config, test):
        notes += _evaluation_notes(evaluation_set, "test set")
    return notes


def _evaluation_notes(evaluation_set: EvaluationSet, name: str) -> list[str]:
    dataset, num_batches, batch_size = evaluation_set.dataset, evaluation_set.num_batches, evaluation_set.batch_size
    drawn, samples = num_batches * batch_size, dataset.epoch_samples
    notes = list(_short(dataset, batch_size, name))
    if drawn > samples >= batch_size:
        notes.append(
            f"--eval-iters {num_batches} x --global-batch-size {batch_size} draws {drawn:,} samples, but the {name} "
            f"has {samples:,}, so each evaluation reads it {drawn / samples:.1f} times; give --eval-iters "
            f"{samples // batch_size}"
        )
    return notes


def _short(dataset: Dataset, batch: int, name: str) -> Iterator[str]:
    if dataset.epoch_samples < batch:
        yield (
            f"the {name} has {dataset.epoch_samples:,} samples, fewer than a global batch of {batch:,}: a batch "
            "holds the same text several times; add text, or lower --global-batch-size or --seq-length"
        )

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
        repeated = [f"{epochs:.1f} epochs of {file_size}" for epochs, file_size in _epochs(train) if epochs > 1]
        if repeated:
            notes.append(f"training repeats its data: {', '.join(repeated)}")
    if not validation.eval_iters:
        return notes
    if valid is None:
        notes.append(_why_no_validation(config))
    for evaluation_set in [] if validation.full_validation else validation_sets(config, valid):
        notes += _evaluation_notes(evaluation_set, f"validation set{evaluation_set.name and ' '}{evaluation_set.name}")
    for evaluation_set in test_sets(config, test):
        notes += _evaluation_notes(evaluation_set, "test set")
    return notes


def epochs_of_run(dataset: Dataset) -> str:
    """How often all draws of a data set read it, such as "1.7 epochs of 61"."""
    samples = dataset.epoch_samples
    return f"{len(dataset) / samples:.1f} epochs of {samples:,}" if samples else "no epoch"


def _evaluation_notes(evaluation_set: EvaluationSet, name: str) -> list[str]:
    return [
        *_short(evaluation_set.dataset, evaluation_set.batch, name),
        *_read_often(evaluation_set.dataset, evaluation_set.rounds, evaluation_set.batch, name),
    ]


def _short(dataset: Dataset, batch: int, name: str) -> Iterator[str]:
    if dataset.epoch_samples < batch:
        yield (
            f"the {name} has {dataset.epoch_samples:,} samples, fewer than a global batch of {batch:,}: a batch "
            "holds the same text several times; add text, or lower --global-batch-size or --seq-length"
        )


def _read_often(dataset: Dataset, eval_iters: int, batch: int, name: str) -> Iterator[str]:
    drawn, samples = eval_iters * batch, dataset.epoch_samples
    if drawn > samples >= batch:
        yield (
            f"--eval-iters {eval_iters} x --global-batch-size {batch} draws {drawn:,} samples, but the {name} has "
            f"{samples:,}, so each evaluation reads it {drawn / samples:.1f} times; give --eval-iters "
            f"{samples // batch}"
        )


def _epochs(dataset: Dataset) -> Iterator[tuple[float, str]]:
    """Epochs over each file that the run reads, and the file's size."""
    if isinstance(dataset, BlendedDataset):
        for member, draws in zip(dataset.datasets, dataset.draws, strict=True):
            yield draws / max(member.epoch_samples, 1), f"{member.epoch_samples:,} samples of {member.name}"
    else:
        yield len(dataset) / max(dataset.epoch_samples, 1), f"{dataset.epoch_samples:,} samples"


def _why_no_validation(config: RunConfig) -> str:
    data = config.data
    if data.data_path or data.mock_data:
        return (
            f"--split {data.split} leaves no text for validation, so nothing is evaluated; raise its second share, "
            "give --valid-data-path, or turn evaluation off with --eval-iters 0"
        )
    return (
        "there is no --valid-data-path, so nothing is evaluated; give one, or turn evaluation off with --eval-iters 0"
    )

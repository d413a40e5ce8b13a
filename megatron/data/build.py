"""Builds the train, validation and test datasets of a run from the data flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.base.errors import UserError
from megatron.config.data import DataConfig, DatasetBlend, check_data, check_data_given
from megatron.data.batch import CollateOptions
from megatron.data.blend import LazyBlend, MegatronBlend, normalize
from megatron.data.cyclic_order import CyclicOrder
from megatron.data.fixed_order import FixedOrder
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.gpt_index import Documents, LazyOrder, MegatronOrder, SampleOrder
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.permute import mix
from megatron.data.source import BlendedDataset, FileSamples, SampleSource

SPLIT_NAMES = ("train", "valid", "test")
# Megatron draws this fraction more than its share from each dataset of a blend, as a margin for its greedy rule.
_MEGATRON_MARGIN = 0.005

Dataset = SampleSource
Datasets = tuple[Dataset | None, Dataset | None, Dataset | None]


@dataclass(frozen=True)
class DatasetPart:
    """The documents of a file that belong to a split.

    Args:
        name: file and split, for messages.
        is_empty: whether it has no tokens.
        epoch_samples: counts the samples per epoch, approximately: the default weight in a blend.
        dataset: builds the dataset from the number of draws (None is an epoch) and a seed specific to this part, for
            orders other than Megatron's.
    """

    name: str
    is_empty: bool
    epoch_samples: Callable[[], int]
    dataset: Callable[[int | None, int], FileSamples]


PartMaker = Callable[[IndexedDataset, tuple[float, float], str], DatasetPart]
"""Makes the part of a file that belongs to a split, from the split's bounds (fractions of the file's sequences or
documents) and the part's name."""


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_valid_test_num_samples: Sequence[int | None],
    eod_token: int,
    vocab_size: int | None,
    check_tokens: bool = True,
) -> Datasets:
    """Open, check and split the data files of the flags, for GPT.

    Args:
        data: the data section.
        seq_length: tokens per sample.
        seed: seed of all shuffles.
        train_valid_test_num_samples: samples to draw from each split; None is an epoch.
        eod_token: id of the end-of-document token.
        vocab_size: exclusive upper bound of token ids; None skips the check.
        check_tokens: whether to check token ids; a single rank per machine is enough.

    Returns:
        (train, valid, test); a split is None if it has no path, or if --split leaves it no documents.

    Raises:
        UserError: when files are damaged or missing, token ids exceed the vocabulary, flags contradict each other, or
            there is no document to train on.
    """
    options = CollateOptions(eod_token, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)

    def make_part(indexed: IndexedDataset, bounds: tuple[float, float], name: str) -> DatasetPart:
        # Sequences are counted, as in Megatron, which rounds halves to even.
        begin, end = (round(bound * float(len(indexed))) for bound in bounds)
        documents = Documents(indexed.lengths[begin:end], begin, name)

        def dataset(num_samples: int | None, part_seed: int) -> GPTDataset:
            # The fixed order already repeats a single epoch.
            cyclic = data.dataloader_type == "cyclic" and data.sample_order != "fixed"
            length = None if cyclic else num_samples
            order: SampleOrder
            if data.sample_order == "megatron":
                identity = file_identity(indexed)
                order = MegatronOrder(documents, seq_length, seed, length, data.data_cache_path, identity)
            elif data.sample_order == "fixed" and num_samples is not None:
                order = FixedOrder(documents, seq_length, part_seed, num_samples)
            else:
                order = LazyOrder(documents, seq_length, part_seed, length)
            if cyclic:
                order = CyclicOrder(order, part_seed, num_samples)
            if (cyclic or data.sample_order == "fixed") and not order.epoch_samples:
                remedy = "leave out --dataloader-type cyclic" if cyclic else "use --sample-order lazy"
                raise UserError(
                    f"{name}: its {documents.tokens_per_epoch()} tokens make no sample of --seq-length {seq_length}. "
                    f"Give it more documents, or {remedy}"
                )
            return GPTDataset(indexed, order, seq_length, options)

        is_empty = not documents.lengths.any()
        return DatasetPart(name, is_empty, lambda: (documents.tokens_per_epoch() - 1) // seq_length, dataset)

    return build_splits(data, make_part, seed, train_valid_test_num_samples, vocab_size, check_tokens)


def build_splits(
    data: DataConfig,
    make_part: PartMaker,
    seed: int,
    train_valid_test_num_samples: Sequence[int | None],
    vocab_size: int | None,
    check_tokens: bool,
) -> Datasets:
    """Open, check and split the data files of the flags, for any kind of dataset; see ``build_datasets``."""
    if data.sample_order not in ("lazy", "fixed", "megatron"):
        raise UserError(f"--sample-order {data.sample_order} is not known: choose lazy, fixed or megatron")
    builder = _Builder(data, make_part, seed, vocab_size, check_tokens)
    check_data_given(data)
    check_data(data, skip_train=True)
    if data.blend is not None:
        splits = [
            builder.read_split(data.blend, number, bounds) for number, bounds in enumerate(split_bounds(data.shares))
        ]
    else:
        splits = [builder.read_split(blend, number, (0.0, 1.0)) for number, blend in enumerate(data.separate_blends)]
    samples = train_valid_test_num_samples
    train, valid, test = (
        None if split is None else builder.dataset(split, samples[number]) for number, split in enumerate(splits)
    )
    return train, valid, test


def split_bounds(shares: Sequence[float]) -> list[tuple[float, float] | None]:
    """Bounds (begin, end) of each share in [0, 1]; None for a share of 0.

    As in Megatron, the bounds are cumulative sums of the normalized shares.
    """
    bounds: list[tuple[float, float] | None] = []
    start = 0.0
    for share in normalize(shares):
        bounds.append((start, start + share) if share > 0 else None)
        start += share
    return bounds


@dataclass
class _SplitSources:
    """Sources of a split: its part of each path, and the user's weights."""

    number: int
    weights: Sequence[float] | None
    dataset_parts: list[DatasetPart]


@dataclass
class _Builder:
    data: DataConfig
    make_part: PartMaker
    seed: int
    vocab_size: int | None
    check_tokens: bool
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def read_split(
        self, blend: DatasetBlend | None, number: int, bounds: tuple[float, float] | None
    ) -> _SplitSources | None:
        """Parts of all paths within ``bounds``; None if the split is empty."""
        if bounds is None or blend is None:
            return None
        dataset_parts = []
        for path in blend.paths:
            if path not in self.opened:
                if not self.data.mock_data:
                    indexed = IndexedDataset(path, self.data.data_impl or "infer")
                elif self.vocab_size is None:
                    raise UserError("--mock-data draws tokens from a vocabulary: give --vocab-size or --tokenizer-type")
                else:
                    indexed = MockDataset(self.seed, self.vocab_size)
                self.opened[path] = indexed
                if self.vocab_size is not None and self.check_tokens:
                    indexed.check_token_range(self.vocab_size, self.data.data_cache_path)
            indexed = self.opened[path]
            dataset_parts.append(self.make_part(indexed, bounds, f"{indexed.prefix} ({SPLIT_NAMES[number]})"))
        empty_names = [dataset_part.name for dataset_part in dataset_parts if dataset_part.is_empty]
        if not empty_names:
            return _SplitSources(number, blend.weights, dataset_parts)
        if number != 0 and len(empty_names) == len(dataset_parts):
            return None
        raise UserError(
            f"{empty_names[0]}: --split {self.data.split} leaves it no tokens. Give it more documents or a larger share"
        )

    def dataset(self, split: _SplitSources, num_samples: int | None) -> Dataset:
        """Build the dataset of a split; blend it when the split has several paths."""
        # megatron-core also blends a single weighted path of --data-path, with its margin.
        if split.number == 1 and self.data.multiple_validation_sets and len(split.dataset_parts) > 1:
            single_splits = [_SplitSources(split.number, None, [dataset_part]) for dataset_part in split.dataset_parts]
            return self._blend_once([self._build_part(single_split, 0, num_samples) for single_split in single_splits])
        if num_samples is None:  # an epoch of each path, without paths that are too short for a sample
            datasets = [self._build_part(split, path_index, None) for path_index in range(len(split.dataset_parts))]
            if len(datasets) == 1:
                return datasets[0]
            return self._blend_once([dataset for dataset in datasets if len(dataset)] or datasets)
        single_blend = split.weights is not None and bool(self.data.data_path) and self.data.sample_order == "megatron"
        if len(split.dataset_parts) == 1 and not single_blend:
            return self._build_part(split, 0, num_samples)
        path_indices = range(len(split.dataset_parts))
        if self.data.sample_order != "megatron":
            weights = split.weights or [
                max(float(dataset_part.epoch_samples()), 1.0) for dataset_part in split.dataset_parts
            ]
            lazy_blend = LazyBlend(weights, num_samples)
            draws = lazy_blend.counts()
            datasets = [self._build_part(split, path_index, draws[path_index]) for path_index in path_indices]
            return BlendedDataset(datasets, lazy_blend, draws)
        if split.weights is None:
            datasets = [self._build_part(split, path_index, None) for path_index in path_indices]
            weights = [float(len(dataset)) for dataset in datasets]
            if sum(weights) < num_samples:
                raise UserError(
                    f"--sample-order megatron reads unweighted paths once: {int(sum(weights))} samples, but "
                    f"the run draws {num_samples}. Give each path a weight, or use --sample-order lazy"
                )
            size = num_samples
        else:
            weights = normalize(split.weights)
            targets = [math.ceil(num_samples * weight) for weight in weights]
            size = sum(targets)
            datasets = [
                self._build_part(split, path_index, math.ceil(targets[path_index] * (1 + _MEGATRON_MARGIN)))
                for path_index in path_indices
            ]
        blend = MegatronBlend(weights, size, self.data.data_cache_path)
        draws = [int((blend.dataset_index == path_index).sum()) for path_index in path_indices]
        return BlendedDataset(datasets, blend, draws)

    def _blend_once(self, datasets: Sequence[FileSamples]) -> BlendedDataset:
        """Blend datasets so that each of their draws is used exactly once."""
        draws = [len(dataset) for dataset in datasets]
        return BlendedDataset(datasets, LazyBlend([max(count, 1) for count in draws], sum(draws)), draws)

    def _build_part(self, split: _SplitSources, path_index: int, num_samples: int | None) -> FileSamples:
        # Paths of a blend and splits of a file must not share a shuffle.
        return split.dataset_parts[path_index].dataset(num_samples, mix(self.seed, split.number, path_index))


def file_identity(indexed: IndexedDataset) -> dict[str, object]:
    """Cache key of a dataset's file: its path, size and modification time."""
    if isinstance(indexed, MockDataset):
        return indexed.identity
    info = Path(indexed.idx_path).stat()
    return {"file": str(indexed.idx_path.resolve()), "size": info.st_size, "mtime_ns": info.st_mtime_ns}

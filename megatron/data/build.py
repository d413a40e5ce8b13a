"""Builds the three datasets of a run from the data flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import UserError
from megatron.config.data import DataConfig, DatasetBlend, check_data, check_data_given
from megatron.data.batch import CollateOptions
from megatron.data.blend import LazyBlend, MegatronBlend, normalize
from megatron.data.fixed_order import FixedOrder
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.gpt_index import Documents, LazyOrder, MegatronOrder
from megatron.data.indexed import IndexedDataset
from megatron.data.permute import mix

SPLIT_NAMES = ("train", "valid", "test")
# Megatron draws this much more from each dataset of a blend than its share, as a margin for its greedy
# choice.
_MEGATRON_MARGIN = 0.005

Dataset = GPTDataset | BlendedDataset


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_valid_test_num_samples: Sequence[int | None],
    eod_token: int,
    vocab_size: int | None,
    check_tokens: bool = True,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Opens, checks and splits the files that the flags name.

    Args:
        data: the data section.
        seq_length: tokens per sample.
        seed: seed of all shuffles.
        train_valid_test_num_samples: samples to draw from each; None is one epoch.
        eod_token: id of the end-of-document token.
        vocab_size: upper bound of token ids; None skips the check.
        check_tokens: whether to check token ids. One rank of each machine is enough to do it.

    Returns:
        (train, valid, test); None where no path is given, or where --split leaves a part no document.

    Raises:
        UserError: when files are damaged or missing, token ids are beyond the vocabulary, flags contradict each
            other, or there is no document to train on.
    """
    if data.sample_order not in ("lazy", "fixed", "megatron"):
        raise UserError(f"--sample-order {data.sample_order} is not known: choose lazy, fixed or megatron")
    if seq_length < 1:
        raise UserError(f"--seq-length {seq_length} must be at least 1")
    builder = _Builder(
        data=data,
        seq_length=seq_length,
        seed=seed,
        collate_options=CollateOptions(
            eod_token, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
        ),
        vocab_size=vocab_size if check_tokens else None,
        opened={},
    )
    check_data_given(data)
    check_data(data, skip_train=True)
    if data.blend is not None:
        parts = [builder.part(data.blend, number, bounds) for number, bounds in enumerate(split_bounds(data.shares))]
    else:
        parts = [builder.part(blend, number, (0.0, 1.0)) for number, blend in enumerate(data.separate_blends)]
    samples = train_valid_test_num_samples
    train, valid, test = (
        None if part is None else builder.dataset(part, samples[number]) for number, part in enumerate(parts)
    )
    return train, valid, test


def split_bounds(shares: Sequence[float]) -> list[tuple[float, float] | None]:
    """The bounds (from, to) of each share in [0, 1]; None for a share of 0.

    Megatron's rule: bounds are running sums of the normalized shares.
    """
    bounds: list[tuple[float, float] | None] = []
    start = 0.0
    for share in normalize(shares):
        bounds.append((start, start + share) if share > 0 else None)
        start += share
    return bounds


@dataclass
class _SplitSources:
    """The documents of one split: one entry for each path, with the weights that the user gave."""

    number: int
    weights: Sequence[float] | None
    sources: list[tuple[IndexedDataset, Documents]]


@dataclass
class _Builder:
    data: DataConfig
    seq_length: int
    seed: int
    collate_options: CollateOptions
    vocab_size: int | None
    opened: dict[str, IndexedDataset]

    def part(self, blend: DatasetBlend | None, number: int, bounds: tuple[float, float] | None) -> _SplitSources | None:
        """The documents between ``bounds`` of every path; None when there are none."""
        if bounds is None or blend is None:
            return None
        sources = []
        for path in blend.paths:
            indexed = self._open(path)
            # Megatron splits by sequence and rounds halves to even.
            begin, end = (round(bound * float(len(indexed))) for bound in bounds)
            name = f"{indexed.prefix} ({SPLIT_NAMES[number]})"
            sources.append((indexed, Documents(indexed.lengths[begin:end], begin, name)))
        empty = [documents.name for _, documents in sources if not documents.lengths.any()]
        if not empty:
            return _SplitSources(number, blend.weights, sources)
        if number != 0 and len(empty) == len(sources):
            return None
        raise UserError(f"{empty[0]}: --split {self.data.split} leaves it no tokens. Give it more documents or share")

    def dataset(self, part: _SplitSources, num_samples: int | None) -> Dataset:
        """The dataset of a split, blended when it has several paths."""
        # megatron-core blends a single weighted path of --data-path as well, with its margin.
        single_blend = part.weights is not None and bool(self.data.data_path) and self.data.sample_order == "megatron"
        if len(part.sources) == 1 and not single_blend:
            return self._single(part, 0, num_samples)
        if self.data.sample_order == "megatron":
            return self._megatron_blend(part, num_samples)
        return self._lazy_blend(part, num_samples)

    def _lazy_blend(self, part: _SplitSources, num_samples: int | None) -> BlendedDataset:
        one_epoch = [float((documents.tokens_per_epoch() - 1) // self.seq_length) for _, documents in part.sources]
        weights = part.weights or [max(samples, 1.0) for samples in one_epoch]
        blend = LazyBlend(weights, int(sum(one_epoch)) if num_samples is None else num_samples)
        draws = blend.counts()
        return BlendedDataset([self._single(part, place, wanted) for place, wanted in enumerate(draws)], blend, draws)

    def _megatron_blend(self, part: _SplitSources, num_samples: int | None) -> BlendedDataset:
        if num_samples is None:
            raise UserError("--sample-order megatron cannot blend without a number of samples: use --sample-order lazy")
        places = range(len(part.sources))
        if part.weights is None:
            datasets = [self._single(part, place, None) for place in places]
            weights = [float(len(dataset)) for dataset in datasets]
            if sum(weights) < num_samples:
                raise UserError(
                    f"--sample-order megatron reads unweighted paths once: {int(sum(weights))} samples, but "
                    f"the run draws {num_samples}. Give each path a weight, or use --sample-order lazy"
                )
            size = num_samples
        else:
            weights = normalize(part.weights)
            targets = [math.ceil(num_samples * weight) for weight in weights]
            size = sum(targets)
            datasets = [
                self._single(part, place, math.ceil(targets[place] * (1 + _MEGATRON_MARGIN))) for place in places
            ]
        blend = MegatronBlend(weights, size, self.data.data_cache_path)
        draws = [int((blend.dataset_index == place).sum()) for place in places]
        return BlendedDataset(datasets, blend, draws)

    def _single(self, part: _SplitSources, place: int, num_samples: int | None) -> GPTDataset:
        indexed, documents = part.sources[place]
        order: LazyOrder | FixedOrder | MegatronOrder
        if self.data.sample_order == "megatron":
            order = MegatronOrder(
                documents,
                self.seq_length,
                self.seed,
                num_samples,
                self.data.data_cache_path,
                _identity(indexed),
            )
        else:
            # Two paths of a blend, or two splits of a file, must not share their shuffles.
            seed = mix(self.seed, part.number, place)
            lazy = FixedOrder if self.data.sample_order == "fixed" else LazyOrder
            order = lazy(documents, self.seq_length, seed, num_samples)
            if self.data.sample_order == "fixed" and not order.epoch_samples:
                raise UserError(
                    f"{documents.name}: its {documents.tokens_per_epoch()} tokens make no sample of "
                    f"--seq-length {self.seq_length}. Give it more documents, or use --sample-order lazy"
                )
        return GPTDataset(indexed, order, self.seq_length, self.collate_options, self.seed)

    def _open(self, path: str) -> IndexedDataset:
        found = self.opened.get(path)
        if found is None:
            found = self.opened[path] = IndexedDataset(path, self.data.data_impl or "infer")
            if self.vocab_size is not None:
                found.check_token_range(self.vocab_size, self.data.data_cache_path)
        return found


def _identity(indexed: IndexedDataset) -> dict[str, object]:
    info = Path(indexed.idx_path).stat()
    return {"file": str(indexed.idx_path.resolve()), "size": info.st_size, "mtime_ns": info.st_mtime_ns}

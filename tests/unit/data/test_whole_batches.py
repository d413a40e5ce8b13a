"""Datasets read once in full batches: every sample counts once, whatever fills the last batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.data.build import Dataset
from megatron.data.build_masked import build_bert_datasets
from megatron.data.source import BlendedDataset
from megatron.data.whole_batches import NO_ORDER, PaddedSource, WholeBatches
from tests.unit.data.cases import build, flags, load, present, rows, write
from tests.unit.data.sentence_cases import random_documents, tokenizer, write_sentences

ORDERS = ["lazy", "fixed", "megatron"]


def valid_set(words: list[str], samples: int | None, **options: Any) -> Dataset:
    data = flags(train_data_path=words, valid_data_path=words, **options)
    return present(build(data, [1, samples, 0])[1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_sample_counts_once(tmp_path: Path, order: str, ranks: int) -> None:
    filled = WholeBatches(valid_set([write(tmp_path / "data", [37 * 8 + 1], 0)], None, sample_order=order), 8)
    assert (len(filled), filled.real_samples) == (40, 37)
    assert isinstance(filled, PaddedSource)
    firsts = []
    for rank in range(ranks):
        with load(filled, 4, rank=rank, ranks=ranks) as loader:
            for batch in loader:
                loss_mask_bs = present(batch.loss_mask_bs)
                counts_b = loss_mask_bs.all(dim=1)
                assert torch.equal(counts_b, loss_mask_bs.any(dim=1))
                assert torch.equal(counts_b, batch.draw_ids_b < 37)
                firsts += present(batch.tokens_bs)[counts_b, 0].tolist()
    assert sorted(firsts) == [sample * 8 for sample in range(37)]


def test_filler_draws_have_no_sentence_order(tmp_path: Path) -> None:
    path = write_sentences(tmp_path / "data", random_documents(50, 1))
    data = flags(train_data_path=[path], valid_data_path=[path], sample_order="lazy")
    options: dict[str, Any] = {"seq_length": 40, "seed": 5, "tokenizer": tokenizer(tmp_path)}
    valid = present(build_bert_datasets(data, train_valid_test_num_samples=[1, None, 0], **options)[1])
    filled = WholeBatches(valid, len(valid) - 1)
    with load(filled, len(filled)) as loader:
        order_b = present(next(loader).order_b)
    assert order_b[: len(valid)].min() >= 0
    assert set(order_b[len(valid) :].tolist()) == {NO_ORDER}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weighted", [True, False])
def test_a_blend_epoch_holds_each_sample_once(tmp_path: Path, order: str, weighted: bool) -> None:
    paths = [write(tmp_path / "a", [37 * 8 + 1], 0), write(tmp_path / "b", [5 * 8 + 1], 10_000)]
    words = ["0.2", paths[0], "0.8", paths[1]] if weighted else paths
    valid = valid_set(words, None, sample_order=order)
    firsts = [int(valid[index][0]) for index in range(len(valid))]
    assert sorted(firsts) == [*(sample * 8 for sample in range(37)), *(10_000 + sample * 8 for sample in range(5))]


@pytest.mark.parametrize("order", ["lazy", "megatron"])
@pytest.mark.parametrize("short_first", [True, False])
def test_a_blend_epoch_skips_files_shorter_than_a_sample(tmp_path: Path, order: str, short_first: bool) -> None:
    paths = [write(tmp_path / "a", [37 * 8 + 1], 0), write(tmp_path / "short", [5], 10_000)]
    valid = valid_set(paths[::-1] if short_first else paths, None, sample_order=order)
    assert sorted(int(valid[index][0]) for index in range(len(valid))) == [sample * 8 for sample in range(37)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("samples", [12, None])
def test_separate_validation_sets_have_equally_many_draws(tmp_path: Path, order: str, samples: int | None) -> None:
    paths = [write(tmp_path / "a", [37 * 8 + 1], 0), write(tmp_path / "b", [5 * 8 + 1], 10_000)]
    valid = valid_set(paths, samples, sample_order=order, multiple_validation_sets=True)
    assert isinstance(valid, BlendedDataset)
    sizes = [len(member) for member in valid.datasets]
    assert sizes == [37, 5] if samples is None else min(sizes) >= samples
    for path, member in zip(paths, valid.datasets, strict=True):
        alone = valid_set([path], samples, sample_order=order)
        assert rows(member) == rows(alone)

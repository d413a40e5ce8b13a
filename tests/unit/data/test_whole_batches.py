"""Datasets read once in full batches: every sample counts once, whatever fills the last batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.data.build import Dataset, build_datasets
from megatron.data.build_masked import build_bert_datasets
from megatron.data.loader import build_loader
from megatron.data.source import BlendedDataset
from megatron.data.whole_batches import NO_ORDER, FilledSource, WholeBatches
from tests.unit.data.cases import flags, write
from tests.unit.data.sentence_cases import random_documents, tokenizer, write_sentences

ORDERS = ["lazy", "fixed", "megatron"]


def valid_set(words: list[str], samples: int | None, **options: Any) -> Dataset:
    data = flags(train_data_path=words, valid_data_path=words, **options)
    _, valid, _ = build_datasets(
        data, seq_length=8, seed=5, train_valid_test_num_samples=[1, samples, 0], eod_token=-1, vocab_size=None
    )
    assert valid is not None
    return valid


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_sample_counts_once(tmp_path: Path, order: str, ranks: int) -> None:
    filled = WholeBatches(valid_set([write(tmp_path / "data", [37 * 8 + 1], 0)], None, sample_order=order), 8)
    assert (len(filled), filled.real_samples) == (40, 37)
    assert isinstance(filled, FilledSource)
    firsts = []
    for rank in range(ranks):
        with build_loader(filled, consumed_samples=0, micro_batch_size=4, dp_rank=rank, dp_size=ranks) as loader:
            for batch in loader:
                assert batch.tokens_bs is not None
                assert batch.loss_mask_bs is not None
                counts_b = batch.loss_mask_bs.all(dim=1)
                assert torch.equal(counts_b, batch.loss_mask_bs.any(dim=1))
                assert torch.equal(counts_b, batch.draw_ids_b < 37)
                firsts += batch.tokens_bs[counts_b, 0].tolist()
    assert sorted(firsts) == [sample * 8 for sample in range(37)]


def test_filler_draws_have_no_sentence_order(tmp_path: Path) -> None:
    path = write_sentences(tmp_path / "data", random_documents(50, 1))
    _, valid, _ = build_bert_datasets(
        flags(train_data_path=[path], valid_data_path=[path], sample_order="lazy"),
        seq_length=40,
        seed=5,
        train_valid_test_num_samples=[1, None, 0],
        tokenizer=tokenizer(tmp_path),
    )
    assert valid is not None
    filled = WholeBatches(valid, len(valid) - 1)
    with build_loader(filled, consumed_samples=0, micro_batch_size=len(filled), dp_rank=0, dp_size=1) as loader:
        batch = next(loader)
    assert batch.order_b is not None
    assert batch.order_b[: len(valid)].min() >= 0
    assert set(batch.order_b[len(valid) :].tolist()) == {NO_ORDER}


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
        assert [member[n].tolist() for n in range(len(member))] == [alone[n].tolist() for n in range(len(alone))]

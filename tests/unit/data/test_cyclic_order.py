"""``--dataloader-type cyclic``: each pass is a permutation of the epoch's samples, whatever the length of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.base.errors import UserError
from megatron.data.build import Dataset
from megatron.data.build_masked import build_bert_datasets
from megatron.data.masked_dataset import MaskedDataset
from tests.unit.data.cases import build_train, flags, present, rows, write
from tests.unit.data.sentence_cases import random_documents, tokenizer, write_sentences

EPOCH = 61
TOKENS = EPOCH * 8 + 3
ORDERS = ["lazy", "fixed", "megatron"]


def gpt(folder: Path, samples: int | None, words: list[str] | None = None, **options: Any) -> Dataset:
    """Dataset whose epoch has 61 samples of 8 tokens."""
    if words is None:
        words = [write(folder / "data", [37] * (TOKENS // 37) + [TOKENS % 37], 0)]
    data = flags(data_path=words, split="1,0,0", dataloader_type="cyclic", **options)
    return build_train(data, samples)


@pytest.mark.parametrize("order", ["lazy", "megatron"])
def test_each_pass_draws_every_sample_once(tmp_path: Path, order: str) -> None:
    train = gpt(tmp_path, 4 * EPOCH, sample_order=order)
    assert train.epoch_samples == EPOCH
    drawn = rows(train)
    passes = [drawn[begin : begin + EPOCH] for begin in range(0, len(drawn), EPOCH)]
    assert len({tuple(map(tuple, epoch_rows)) for epoch_rows in passes}) == 4
    assert all(sorted(epoch_rows) == sorted(passes[0]) for epoch_rows in passes)
    assert len({tuple(row) for row in passes[0]}) == EPOCH
    assert sorted(train.sample_id(index) for index in range(EPOCH)) == list(range(EPOCH))


def test_the_recurring_order_already_consists_of_passes(tmp_path: Path) -> None:
    cyclic = gpt(tmp_path, 130, sample_order="fixed")
    single = build_train(flags(data_path=[str(tmp_path / "data")], split="1,0,0", sample_order="fixed"), 130)
    assert rows(cyclic) == rows(single)
    assert cyclic.lanes == single.lanes


@pytest.mark.parametrize("order", ORDERS)
def test_a_longer_run_starts_with_the_draws_of_a_shorter_run(tmp_path: Path, order: str) -> None:
    short, long = (rows(gpt(tmp_path, samples, sample_order=order)) for samples in (40, 200))
    assert long[:40] == short


def test_an_extended_run_reads_each_sample_once_per_pass(tmp_path: Path) -> None:
    """Draws before the stop come from the shorter run's dataset, those after it from the longer run's."""
    stop = 2 * EPOCH - 12
    drawn = rows(gpt(tmp_path, stop))[:stop] + rows(gpt(tmp_path, 3 * EPOCH))[stop:]
    for begin in range(0, 3 * EPOCH, EPOCH):
        assert len({tuple(row) for row in drawn[begin : begin + EPOCH]}) == EPOCH


@pytest.mark.parametrize(
    ("order", "weights"),
    # megatron reads datasets without weights once
    [("lazy", None), ("fixed", None), *((order, (0.2, 0.8)) for order in ORDERS)],
)
def test_blends_pass_over_each_dataset_separately(
    tmp_path: Path, order: str, weights: tuple[float, float] | None
) -> None:
    """A dataset with a small weight is read to its end before a sample of it returns."""
    prefixes = [write(tmp_path / "a", [EPOCH * 8 + 1], 0), write(tmp_path / "b", [32 * 8 + 1], 10_000)]
    words = prefixes if weights is None else [str(weights[0]), prefixes[0], str(weights[1]), prefixes[1]]
    short, long = (gpt(tmp_path, samples, words, sample_order=order) for samples in (150, 600))
    drawn = rows(long)
    assert drawn[:150] == rows(short)
    for first, (low, high), size in zip((0, 1), ((0, 10_000), (10_000, 20_000)), (EPOCH, 32), strict=True):
        mine = [tuple(row) for row in drawn if low <= row[0] < high]
        size -= size % 2 if order == "fixed" else 0  # lanes leave the odd sample out
        assert len(mine) > size or first == 0
        for begin in range(0, len(mine), size):
            passed = mine[begin : begin + size]
            assert len(set(passed)) == len(passed)


@pytest.mark.parametrize("order", ["lazy", "megatron"])
def test_sentences_are_read_once_per_pass_with_new_masks(tmp_path: Path, order: str) -> None:
    path = write_sentences(tmp_path / "data", random_documents(50, 1))

    def bert(samples: int | None) -> Dataset:
        data = flags(data_path=[path], split="1,0,0", sample_order=order, dataloader_type="cyclic")
        options: dict[str, Any] = {"seq_length": 40, "seed": 5, "tokenizer": tokenizer(tmp_path)}
        return present(build_bert_datasets(data, train_valid_test_num_samples=[samples, 0, 0], **options)[0])

    epoch = len(bert(None))
    train = bert(3 * epoch)
    assert train.epoch_samples == epoch
    assert isinstance(train, MaskedDataset)
    sentences = [train.order.sentences(train.sample_id(index))[:2] for index in range(len(train))]
    passes = [sentences[begin : begin + epoch] for begin in range(0, len(sentences), epoch)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert passes[0] != passes[1] != passes[2]
    assert rows(bert(epoch // 2)) == rows(train)[: epoch // 2]
    contents = {tuple(row) for row in rows(train)}
    assert len(contents) > 2 * epoch


def test_a_text_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "short", [5], 0)
    with pytest.raises(UserError, match="5 tokens make no sample of --seq-length 8"):
        gpt(tmp_path, 10, [path], sample_order="lazy")
    assert np.ptp(gpt(tmp_path, None, sample_order="lazy")[0]) > 0

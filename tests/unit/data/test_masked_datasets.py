"""Datasets of BERT and T5: labels and spans restore the text, on any layout, in every order; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.base.errors import UserError
from megatron.data.batch import Batch
from megatron.data.build import Dataset
from megatron.data.build_masked import build_bert_datasets, build_t5_datasets
from megatron.data.indexed import IndexedDataset
from megatron.data.loader import MicroBatches
from tests.unit.data.cases import flags, load, present
from tests.unit.data.sentence_cases import FIRST_WORD, random_documents, tokenizer, write_sentences

EXTRA_IDS = 20
ORDERS = ["lazy", "fixed", "megatron"]


def bert(folder: Path, samples: int | None = 90, lengths: list[list[int]] | None = None, **options: Any) -> Dataset:
    path = write_sentences(folder / "data", random_documents(50, 1) if lengths is None else lengths)
    data = flags(data_path=[path], split="1,0,0", sample_order=options.pop("order", "lazy"))
    values = {"seq_length": 40, "seed": 5, "tokenizer": tokenizer(folder, options.pop("extra_ids", 0)), **options}
    return present(build_bert_datasets(data, train_valid_test_num_samples=[samples, 0, 0], **values)[0])


def t5(folder: Path, samples: int | None = 90, lengths: list[list[int]] | None = None, **options: Any) -> Dataset:
    path = write_sentences(folder / "data", random_documents(50, 1) if lengths is None else lengths)
    data = flags(data_path=[path], split="1,0,0", sample_order=options.pop("order", "lazy"))
    values = {"encoder_seq_length": 40, "decoder_seq_length": 30, "seed": 5, **options}
    values = {"tokenizer": tokenizer(folder, values.pop("extra_ids", EXTRA_IDS)), **values}
    return present(build_t5_datasets(data, train_valid_test_num_samples=[samples, 0, 0], **values)[0])


def as_one_batch(dataset: Dataset) -> Batch:
    """All draws as a single batch."""
    with load(dataset, len(dataset), num_workers=0) as loader:
        return next(loader)


def rows_of(batch: Batch, *names: str) -> list[tuple[list[int], ...]]:
    return list(zip(*(getattr(batch, name).tolist() for name in names), strict=True))


def text_of(folder: Path) -> str:
    """All tokens of the file, as a string to search in."""
    indexed = IndexedDataset(folder / "data")
    return words(indexed.read_range(0, len(indexed)).tolist())


def words(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("binary_head", [True, False])
def test_labels_restore_the_text_of_bert(tmp_path: Path, order: str, binary_head: bool) -> None:
    batch = as_one_batch(bert(tmp_path, order=order, binary_head=binary_head))
    special = tokenizer(tmp_path).ids
    text = text_of(tmp_path)
    assert batch.order_b is not None
    orders = set(batch.order_b.tolist())
    assert orders == ({0, 1} if binary_head else {0})
    names = ("tokens_bs", "labels_bs", "loss_mask_bs", "types_bs", "segment_ids_bs", "position_ids_bs")
    for swapped, row in zip(batch.order_b.tolist(), rows_of(batch, *names), strict=True):
        tokens, labels, mask, types, segments, positions = row
        length = segments.count(0)
        assert segments == [0] * length + [1] * (40 - length)
        assert positions == list(range(40))
        assert tokens[length:] == [special.pad] * (40 - length)
        restored = [label if counts else token for token, label, counts in zip(tokens, labels, mask, strict=True)]
        ends = [position for position in range(length) if restored[position] == special.sep]
        assert restored[0] == special.cls
        assert ends[-1] == length - 1
        assert len(ends) == 1 + binary_head
        first, second = restored[1 : ends[0]], restored[ends[0] + 1 : length - 1]
        assert types == [0] * (ends[0] + 1) + [1] * (length - ends[0] - 1) + [0] * (40 - length)
        assert all(words(half) in text for half in (first, second))
        assert min(first + second) >= FIRST_WORD  # no special token was masked
        assert sum(mask) <= max(1, round(0.15 * length))  # none where the only word has too many pieces
        # Halves without a cut stand next to each other in the file.
        if binary_head and length < 40 and words([*second, *first] if swapped else [*first, *second]) in text:
            orders.discard(swapped)
    assert not orders or not binary_head
    assert present(batch.loss_mask_bs).sum() > 0.1 * (present(batch.segment_ids_bs) == 0).sum()


@pytest.mark.parametrize("order", ORDERS)
def test_spans_restore_the_text_of_t5(tmp_path: Path, order: str) -> None:
    batch = as_one_batch(t5(tmp_path, order=order))
    special = tokenizer(tmp_path, EXTRA_IDS).ids
    text = text_of(tmp_path)
    names = ("tokens_bs", "segment_ids_bs", "decoder_tokens_bs", "decoder_segment_ids_bs", "labels_bs", "loss_mask_bs")
    for encoder, segments, decoder, decoder_segments, labels, mask in rows_of(batch, *names):
        length, decoder_length = segments.count(0), decoder_segments.count(0)
        assert segments == [0] * length + [1] * (40 - length)
        assert decoder_segments == [0] * decoder_length + [1] * (30 - decoder_length)
        assert mask == [1.0] * decoder_length + [0.0] * (30 - decoder_length)
        assert [*decoder[:decoder_length], special.eos] == [special.bos, *labels[:decoder_length]]
        assert encoder[length:] == [special.pad] * (40 - length)
        spans: dict[int, list[int]] = {}
        for token in decoder[1:decoder_length]:
            if token in special.sentinels:
                spans[token] = []
            else:
                spans[max(spans)].append(token)
        assert list(spans) == list(special.sentinels)[: len(spans)]
        restored = [piece for token in encoder[:length] for piece in spans.pop(token, [token])]
        assert not spans
        assert words(restored) in text


def test_bert_replaces_as_often_as_its_paper(tmp_path: Path) -> None:
    batch = as_one_batch(bert(tmp_path, samples=3000))
    assert batch.tokens_bs is not None
    assert batch.labels_bs is not None
    assert batch.loss_mask_bs is not None
    chosen = batch.loss_mask_bs == 1
    tokens, labels = batch.tokens_bs[chosen], batch.labels_bs[chosen]
    mask = tokenizer(tmp_path).ids.mask
    assert abs((tokens == mask).float().mean() - 0.8) < 0.02
    # A random token may equal the original.
    assert abs((tokens == labels).float().mean() - 0.1) < 0.02
    assert len(set(tokens.tolist())) == tokenizer(tmp_path).vocab_size


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [bert, t5])
def test_draws_do_not_depend_on_layout_or_resume(tmp_path: Path, order: str, make: Any) -> None:
    dataset = make(tmp_path, order=order, samples=48)
    expected = as_one_batch(dataset)
    assert expected.tokens_bs is not None
    for ranks, micro, consumed in ((1, 3, 0), (2, 4, 16), (4, 2, 24)):
        for rank in range(ranks):
            options: dict[str, Any] = {"micro_batch_size": micro, "dp_rank": rank, "dp_size": ranks, "num_workers": 2}
            with MicroBatches(dataset, consumed_samples=consumed, **options) as loader:
                for batch in (next(loader), next(loader)):
                    assert batch.tokens_bs is not None
                    assert batch.tokens_bs.equal(expected.tokens_bs[batch.draw_ids_b])
                    assert batch.sample_ids_b.equal(expected.sample_ids_b[batch.draw_ids_b])


def test_epochs_of_the_orders(tmp_path: Path) -> None:
    """lazy: the same sentences with other masks; fixed: the same samples; a longer run begins like a shorter one."""
    lazy = bert(tmp_path, samples=None)
    epoch = lazy.epoch_samples
    assert len(lazy) == epoch
    longer = bert(tmp_path, samples=3 * epoch)
    rows = [tuple(row(longer, index)) for index in range(3 * epoch)]
    assert rows[:epoch] == [tuple(row(lazy, index)) for index in range(epoch)]
    assert len(set(rows)) > 2.9 * epoch
    assert len({longer.sample_id(index) for index in range(3 * epoch)}) == 3 * epoch
    size = bert(tmp_path, samples=1, order="fixed").epoch_samples  # without a number it is each sample once
    fixed = bert(tmp_path, samples=2 * size, order="fixed")
    again = [[tuple(row(fixed, index)) for index in range(start, start + size)] for start in (0, size)]
    assert sorted(again[0]) == sorted(again[1])
    assert again[0] != again[1]
    assert len(set(again[0])) == size
    assert fixed.lanes is not None
    assert [fixed.sample_id(index) % fixed.lanes for index in range(2 * size)] == [
        index % fixed.lanes for index in range(2 * size)
    ]


def row(dataset: Dataset, index: int) -> list[int]:
    out_t = np.empty(dataset.row_length, dtype=np.int64)
    dataset.read(index, out_t)
    return out_t.tolist()


def test_splits_take_documents_and_blends_mix(tmp_path: Path) -> None:
    first = write_sentences(tmp_path / "one", [[3, 4, 5]] * 10, 1)
    second = write_sentences(tmp_path / "two", [[6, 7]] * 10, 2)
    data = flags(data_path=[first], split="8,1,1", sample_order="lazy")
    options: dict[str, Any] = {"seq_length": 20, "seed": 1, "tokenizer": tokenizer(tmp_path)}
    splits = build_bert_datasets(data, train_valid_test_num_samples=[None] * 3, **options)
    assert [len(split) for split in splits if split is not None] == [8, 1, 1]
    data = flags(data_path=["1", first, "3", second], split="1,0,0", sample_order="lazy")
    train, valid, _ = build_bert_datasets(data, train_valid_test_num_samples=[40, 0, 0], **options)
    assert valid is None
    lengths = [row(present(train), index)[-2] for index in range(40)]
    assert {length: lengths.count(length) for length in set(lengths) if length > 15} == {16: 30}


def test_the_megatron_order_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sentences(tmp_path / "data", random_documents(50, 1))
    data = flags(data_path=[path], split="1,0,0", data_cache_path=str(tmp_path / "cache"))
    options: dict[str, Any] = {"seq_length": 40, "seed": 5, "tokenizer": tokenizer(tmp_path)}
    options["train_valid_test_num_samples"] = [100, 0, 0]
    first = present(build_bert_datasets(data, **options)[0])
    monkeypatch.setattr("megatron.data.sentence_order.cut_in_order", None)
    again = present(build_bert_datasets(data, **options)[0])
    assert [row(again, index) for index in range(100)] == [row(first, index) for index in range(100)]
    assert again.epoch_samples == first.epoch_samples


@pytest.mark.parametrize("decoder", [3, 4, 9])
def test_spans_without_room_stay_in_the_text(tmp_path: Path, decoder: int) -> None:
    batch = as_one_batch(t5(tmp_path, decoder_seq_length=decoder, extra_ids=2, mask_prob=0.9))
    sentinels = tokenizer(tmp_path, 2).ids.sentinels
    assert int((present(batch.labels_bs) >= sentinels[0]).sum(dim=1).max()) <= 2
    assert int((present(batch.decoder_segment_ids_bs) == 0).sum()) > 0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (bert, {"seq_length": 4}, "--seq-length 4 leaves no room for text besides 3 special tokens: give at least 5"),
        (t5, {"encoder_seq_length": 3}, "--encoder-seq-length 3 leaves no room"),
        (t5, {"decoder_seq_length": 2}, "--decoder-seq-length 2 must be at least 3"),
        (t5, {"extra_ids": 0}, "give --vocab-extra-ids 100"),
        (bert, {"mask_prob": 0.0}, "--mask-prob 0.0 must lie between 0 and 1"),
        (t5, {"mask_prob": 1.0}, "--mask-prob 1.0 must lie between 0 and 1"),
        (bert, {"short_seq_prob": -0.5}, "--short-seq-prob -0.5 must be from 0 to 1"),
        (bert, {"lengths": [[4], [], [9]]}, r"data \(train\): every document is one sentence.*--bert-no-binary-head"),
        (
            bert,
            {"lengths": [[4, 600], [9]]},
            r"data \(train\): no document has 2 or more sentences, none of them above",
        ),
        (t5, {"lengths": [[100], [200]]}, r"data \(train\): every document is one sequence, of up to 200 tokens"),
        (bert, {"lengths": [[100]], "binary_head": False}, r"data \(train\): every document is one sequence"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_invalid_options_are_refused(
    tmp_path: Path, make: Any, options: dict[str, Any], message: str, order: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(tmp_path, order=order, **options)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    from megatron.tokenizer.null import NullTokenizer

    with pytest.raises(UserError, match=r"--tokenizer-type NullTokenizer has no .MASK."):
        bert(tmp_path, tokenizer=NullTokenizer(99))

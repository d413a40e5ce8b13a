"""``--mock-data``: tokens of the vocabulary, equal on every read, for every kind and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.base.errors import UserError
from megatron.config.data import DataConfig, check_data, check_data_given
from megatron.data.build_masked import build_bert_datasets
from megatron.data.mock import SEQUENCE_TOKENS, MockDataset
from tests.unit.data.cases import build, flags, present, rows
from tests.unit.data.sentence_cases import tokenizer


def gpt(seed: int = 1, vocab_size: int | None = 97, **options: Any) -> Any:
    data = flags(mock_data=True, split="8,1,1", **{"sample_order": "lazy", **options})
    shape: dict[str, Any] = {"seq_length": 300, "seed": seed, "vocab_size": vocab_size, "check_tokens": False}
    return build(data, [50, 20, 20], eod_token=96, **shape)


@pytest.mark.parametrize("order", ["lazy", "fixed"])
def test_three_splits_of_tokens_of_the_vocabulary(order: str) -> None:
    splits = gpt(sample_order=order)
    rows = [np.stack([split[index] for index in range(20)]) for split in splits]
    for rows_bt in rows:
        assert rows_bt.shape == (20, 301)
        assert rows_bt.min() >= 0
        assert rows_bt.max() == 96
    assert len({row.tobytes() for rows_bt in rows for row in rows_bt}) == 60
    again = gpt(sample_order=order)
    assert np.array_equal(rows[0], np.stack([again[0][index] for index in range(20)]))
    other = gpt(seed=2, sample_order=order)
    assert not np.array_equal(rows[0], np.stack([other[0][index] for index in range(20)]))


def test_slices_equal_the_full_sequence() -> None:
    mock = MockDataset(3, 50)
    tokens = mock.read_range(10, 13)
    assert tokens.tolist() == [token for number in range(10, 13) for token in mock[number].tolist()]
    assert mock.get(11, 5, 7).tolist() == tokens[SEQUENCE_TOKENS + 5 : SEQUENCE_TOKENS + 12].tolist()
    steps = np.diff(mock[4]) % 50
    assert set(steps.tolist()) == {1, 2, 3, 4, 5}


def test_bert_reads_mock_sentences(tmp_path: Path) -> None:
    data = flags(mock_data=True, split="1,0,0", sample_order="lazy")
    options: dict[str, Any] = {"seq_length": 64, "seed": 5, "tokenizer": tokenizer(tmp_path)}
    train, _, _ = build_bert_datasets(data, train_valid_test_num_samples=[10, 0, 0], **options)
    assert len({tuple(row) for row in rows(present(train))}) == 10


def test_conflicting_flags_are_refused() -> None:
    check_data_given(DataConfig(mock_data=True))
    with pytest.raises(UserError, match=r"^--mock-data and --data-path exclude each other; leave one of them out$"):
        check_data(DataConfig(mock_data=True, data_path=["a"]), skip_train=False)
    with pytest.raises(UserError, match=r"^--mock-data and --train-data-path exclude each other"):
        check_data(DataConfig(mock_data=True, train_data_path=["a"]), skip_train=False)
    with pytest.raises(UserError, match=r"^--mock-data draws tokens from a vocabulary: give --vocab-size"):
        gpt(vocab_size=None)

"""Samples of BERT and T5 against megatron-core, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.build import Dataset
from megatron.data.build_masked import build_bert_datasets, build_t5_datasets
from tests.unit.data.cases import flags
from tests.unit.data.sentence_cases import all_tokens, random_documents, tokenizer, write_sentences
from tests.unit.data.test_oracle import ORACLE, ask

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not ORACLE, reason="MEGATRON_CORE_ORACLE names no folder with megatron-core"),
]

EXTRA_IDS = 40


def bert_case(blend: list[Any], split: str, sizes: list[int], **options: Any) -> dict[str, Any]:
    case = {"model": "BERT", "blend": blend, "split": split, "sizes": sizes, "seed": 1234, "seq_length": 48}
    case |= {"mask_prob": 0.15, "short_seq_prob": 0.1, "classification_head": True, **options}
    head = case.pop("classification_head")
    case["more"] = {"classification_head": head, "masking_max_ngram": 3, "masking_use_geometric_distribution": False}
    return case


def t5_case(blend: list[Any], split: str, sizes: list[int], **options: Any) -> dict[str, Any]:
    case = {"model": "T5", "blend": blend, "split": split, "sizes": sizes, "seed": 7, "seq_length": 64}
    case |= {"mask_prob": 0.15, "short_seq_prob": 0.1, **options}
    case["more"] = {"sequence_length_decoder": 32, "masking_max_ngram": 10, "masking_use_geometric_distribution": True}
    return case


def all_cases(folder: Path) -> list[dict[str, Any]]:
    many = write_sentences(folder / "many", random_documents(60, 1), 1)
    few = write_sentences(folder / "few", random_documents(12, 2), 2)
    single, blend = [[many], None], [[many, few], [0.3, 0.7]]
    cases = [
        bert_case(single, "8,1,1", [1, 9, 3]),
        bert_case(single, "1,0,0", [200, 0, 0], seed=3),
        bert_case(single, "1,0,0", [150, 0, 0], short_seq_prob=0.0),
        bert_case(single, "1,0,0", [150, 0, 0], short_seq_prob=0.5, seq_length=20, mask_prob=0.4),
        bert_case(single, "1,0,0", [120, 0, 0], classification_head=False),
        bert_case(single, "1,0,0", [60, 0, 0], seq_length=512),
        bert_case(blend, "1,0,0", [200, 0, 0]),
        bert_case([[few], [1.0]], "1,0,0", [30, 0, 0]),
        t5_case(single, "8,1,1", [100, 9, 3]),
        t5_case(single, "1,0,0", [150, 0, 0], short_seq_prob=0.5),
        t5_case(blend, "1,0,0", [150, 0, 0], mask_prob=0.1),
    ]
    common: dict[str, Any] = {"what": "masked_samples", "cache": str(folder / "cache")}
    common |= {"tokens": all_tokens(EXTRA_IDS), "sentinels": [len(all_tokens(0)) + n for n in range(EXTRA_IDS)]}
    return [{**case, **common} for case in cases]


def ours(folder: Path, case: dict[str, Any]) -> list[Dataset | None]:
    paths, weights = case["blend"]
    words = paths if weights is None else [word for pair in zip(map(str, weights), paths, strict=True) for word in pair]
    data = flags(data_path=words, split=case["split"])
    options: dict[str, Any] = {
        "seed": case["seed"],
        "train_valid_test_num_samples": case["sizes"],
        "tokenizer": tokenizer(folder, EXTRA_IDS),
        "mask_prob": case["mask_prob"],
        "short_seq_prob": case["short_seq_prob"],
    }
    if case["model"] == "BERT":
        head = case["more"]["classification_head"]
        return list(build_bert_datasets(data, seq_length=case["seq_length"], binary_head=head, **options))
    decoder = case["more"]["sequence_length_decoder"]
    return list(build_t5_datasets(data, encoder_seq_length=case["seq_length"], decoder_seq_length=decoder, **options))


# megatron-core's names of a batch's tensors.
BERT_NAMES = {"text": "tokens_bs", "types": "types_bs", "loss_mask": "loss_mask_bs"}
T5_NAMES = {"text_enc": "tokens_bs", "text_dec": "decoder_tokens_bs", "loss_mask": "loss_mask_bs"}


def check_sample(dataset: Dataset, index: int, theirs: dict[str, Any], bert: bool) -> None:
    row_t = np.empty((1, dataset.row_length), dtype=np.int64)
    dataset.read(index, row_t[0])
    batch = dataset.collate(row_t, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    for their_name, name in (BERT_NAMES if bert else T5_NAMES).items():
        assert getattr(batch, name)[0].tolist() == theirs[their_name], (index, name)
    # Where there is no loss, labels are -1 there and [PAD] here.
    assert batch.labels_bs is not None
    assert batch.labels_bs[0].tolist() == [max(label, 0) for label in theirs["labels"]], index
    masks = {"padding_mask": ("segment_ids_bs", "tokens_bs")} if bert else {"enc_mask": ("segment_ids_bs", "tokens_bs")}
    masks |= {} if bert else {"dec_mask": ("decoder_segment_ids_bs", "decoder_tokens_bs")}
    for their_name, (name, tokens) in masks.items():
        # A [PAD] drawn in place of a masked token is padding there and text here.
        is_text_s = (getattr(batch, name)[0] == 0) & (getattr(batch, tokens)[0] != 0)
        assert is_text_s.int().tolist() == theirs[their_name], (index, name)
    if bert:
        assert batch.order_b is not None
        assert batch.order_b.tolist() == [theirs["is_random"]], index


@pytest.mark.slow
def test_every_sample_equals_megatron_core(tmp_path: Path) -> None:
    cases = all_cases(tmp_path)
    for case, answer in zip(cases, ask(tmp_path, cases), strict=True):
        for dataset, theirs in zip(ours(tmp_path, case), answer["splits"], strict=True):
            assert (0 if dataset is None else len(dataset)) == len(theirs), case
            for index, sample in enumerate(theirs):
                assert dataset is not None
                check_sample(dataset, index, sample, case["model"] == "BERT")

"""Builds the train, validation and test datasets of BERT and T5 runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron.base.errors import UserError
from megatron.config.data import DataConfig
from megatron.data.bert_dataset import BERT_SPECIAL_TOKENS, BertDataset
from megatron.data.build import DatasetPart, Datasets, build_splits, file_identity
from megatron.data.cyclic_order import CyclicSentences
from megatron.data.indexed import IndexedDataset
from megatron.data.masked_dataset import MaskedDataset
from megatron.data.masking import BERT_MASKING_NGRAM, T5_MASKING_NGRAM, WordMasker, WordMasking
from megatron.data.sentence_order import FixedSentences, LazySentences, MegatronSentences, SentenceOrder
from megatron.data.sentences import Cut, SentenceDocuments, check_split
from megatron.data.t5_dataset import T5_SPECIAL_TOKENS, T5Dataset
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.wordpiece import word_piece_ids

# Smallest target length of a sample, as in megatron-core.
_MIN_TARGET = 2
# [BOS], a sentinel and a token.
_MIN_DECODER = 3


def build_bert_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_valid_test_num_samples: Sequence[int | None],
    tokenizer: Tokenizer,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    binary_head: bool = True,
    check_tokens: bool = True,
) -> Datasets:
    """Open, check and split the data files of the flags, for BERT.

    Args:
        data, seed, train_valid_test_num_samples, check_tokens: see ``build_datasets``.
        seq_length: tokens per sample, [CLS] and [SEP] included.
        tokenizer: the tokenizer that the data was encoded with.
        mask_prob: fraction of tokens to predict.
        short_seq_prob: fraction of samples that are shorter than the maximum.
        binary_head: whether to predict the order of two sentences, which needs documents with several sentences.

    Returns:
        See ``build_datasets``. --split divides documents.

    Raises:
        UserError: see ``build_datasets``; also when the files do not hold sentences, the tokenizer has no [MASK], or
            the samples are too short.
    """
    ids = word_piece_ids(tokenizer)
    _check_length(seq_length, BERT_SPECIAL_TOKENS, "--seq-length")
    _check_shares(mask_prob, short_seq_prob)
    cut = Cut(seq_length - BERT_SPECIAL_TOKENS, 2 if binary_head else 1, short_seq_prob)
    masking = WordMasking(mask_prob, BERT_MASKING_NGRAM, geometric=False)
    make = partial(BertDataset, seq_length=seq_length, binary_head=binary_head)
    masker = WordMasker(masking, ids.continues_v, (ids.cls, ids.sep))
    make_part = partial(_make_part, data, seed, cut, lambda indexed, order: make(indexed, order, ids, masker))
    return build_splits(data, make_part, seed, train_valid_test_num_samples, tokenizer.vocab_size, check_tokens)


def build_t5_datasets(
    data: DataConfig,
    *,
    encoder_seq_length: int,
    decoder_seq_length: int,
    seed: int,
    train_valid_test_num_samples: Sequence[int | None],
    tokenizer: Tokenizer,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    check_tokens: bool = True,
) -> Datasets:
    """Open, check and split the data files of the flags, for T5.

    Takes the arguments of ``build_bert_datasets``; the tokenizer needs sentinels.

    Raises:
        UserError: see ``build_bert_datasets``; also when the tokenizer has no extra ids.
    """
    ids = word_piece_ids(tokenizer)
    if not len(ids.sentinels):
        raise UserError("T5 marks removed spans with extra ids: give --vocab-extra-ids 100")
    _check_length(encoder_seq_length, T5_SPECIAL_TOKENS, "--encoder-seq-length")
    if decoder_seq_length < _MIN_DECODER:
        raise UserError(f"--decoder-seq-length {decoder_seq_length} must be at least {_MIN_DECODER}")
    _check_shares(mask_prob, short_seq_prob)
    cut = Cut(encoder_seq_length - T5_SPECIAL_TOKENS, 1, short_seq_prob)
    masking = WordMasking(mask_prob, T5_MASKING_NGRAM, geometric=True)
    make = partial(T5Dataset, encoder_length=encoder_seq_length, decoder_length=decoder_seq_length)
    masker = WordMasker(masking, ids.continues_v, (ids.cls, ids.sep))
    make_part = partial(_make_part, data, seed, cut, lambda indexed, order: make(indexed, order, ids, masker))
    return build_splits(data, make_part, seed, train_valid_test_num_samples, tokenizer.vocab_size, check_tokens)


def _check_length(length: int, special: int, flag: str) -> None:
    if length < special + _MIN_TARGET:
        raise UserError(
            f"{flag} {length} leaves no room for text besides {special} special tokens: give at least "
            f"{special + _MIN_TARGET}"
        )


def _check_shares(mask_prob: float, short_seq_prob: float) -> None:
    if not 0 < mask_prob < 1:
        raise UserError(f"--mask-prob {mask_prob} must lie between 0 and 1, such as 0.15")
    if not 0 <= short_seq_prob <= 1:
        raise UserError(f"--short-seq-prob {short_seq_prob} must be from 0 to 1, such as 0.1")


def _make_part(
    data: DataConfig,
    seed: int,
    cut: Cut,
    make: Callable[[IndexedDataset, SentenceOrder], MaskedDataset],
    indexed: IndexedDataset,
    bounds: tuple[float, float],
    name: str,
) -> DatasetPart:
    # Documents are counted, as in megatron-core, which rounds halves to even.
    begin, end = (round(bound * float(indexed.num_documents)) for bound in bounds)
    starts_d = indexed.doc_idx[begin : end + 1]
    documents = SentenceDocuments(indexed.lengths, starts_d, name)

    def epoch_samples() -> int:
        return int(documents.lengths_s[int(starts_d[0]) : int(starts_d[-1])].sum(dtype=int)) // cut.max_tokens

    def dataset(num_samples: int | None, part_seed: int) -> MaskedDataset:
        check_split(documents, cut.max_tokens)
        order: SentenceOrder
        if data.sample_order == "megatron":
            # The other orders already repeat a single epoch.
            cyclic = data.dataloader_type == "cyclic"
            length = None if cyclic else num_samples
            identity = file_identity(indexed)
            order = MegatronSentences(documents, cut, seed, length, data.data_cache_path, identity)
            if cyclic:
                order = CyclicSentences(order, part_seed, num_samples)
        elif data.sample_order == "fixed" and num_samples is not None:
            order = FixedSentences(documents, cut, part_seed, num_samples)
        else:
            order = LazySentences(documents, cut, part_seed, num_samples)
        return make(indexed, order)

    is_empty = len(starts_d) < 2 or bool(starts_d[0] == starts_d[-1])
    return DatasetPart(name, is_empty, epoch_samples, dataset)

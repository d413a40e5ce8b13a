"""Builds the train, validation and test datasets of BERT and T5 runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.base.errors import UserError
from megatron.config.data import DataConfig
from megatron.data.bert_dataset import BERT_SPECIAL_TOKENS, BertDataset
from megatron.data.build import Datasets, build_splits, file_identity
from megatron.data.cyclic_order import CyclicSentences
from megatron.data.indexed import IndexedDataset
from megatron.data.masked_dataset import MaskedDataset
from megatron.data.masking import BERT_MASKING_NGRAM, T5_MASKING_NGRAM, WordMasker, WordMasking
from megatron.data.sentence_order import FixedSentences, LazySentences, MegatronSentences, SentenceOrder
from megatron.data.sentences import Cut, SentenceDocuments, check_split, no_samples
from megatron.data.t5_dataset import T5_SPECIAL_TOKENS, T5Dataset
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.wordpiece import WordPieceIds, word_piece_ids

# Smallest target length of a sample, as in megatron-core.
_LEAST_TARGET = 2
# [BOS], a sentinel and a token.
_LEAST_DECODER = 3


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
    """Opens, checks and splits the data files of the flags, for BERT.

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
    kind = _MaskedKind(data, seed, cut, ids, WordMasker(masking, ids.continues_v, (ids.cls, ids.sep)), make)
    return build_splits(data, kind, seed, train_valid_test_num_samples, tokenizer.vocab_size, check_tokens)


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
    """Opens, checks and splits the data files of the flags, for T5.

    Takes the arguments of ``build_bert_datasets``; the tokenizer needs sentinels.

    Raises:
        UserError: see ``build_bert_datasets``; also when the tokenizer has no extra ids.
    """
    ids = word_piece_ids(tokenizer)
    if not len(ids.sentinels):
        raise UserError("T5 marks what is cut out of a text with extra ids: give --vocab-extra-ids 100")
    _check_length(encoder_seq_length, T5_SPECIAL_TOKENS, "--encoder-seq-length")
    if decoder_seq_length < _LEAST_DECODER:
        raise UserError(f"--decoder-seq-length {decoder_seq_length} must be at least {_LEAST_DECODER}")
    _check_shares(mask_prob, short_seq_prob)
    cut = Cut(encoder_seq_length - T5_SPECIAL_TOKENS, 1, short_seq_prob)
    masking = WordMasking(mask_prob, T5_MASKING_NGRAM, geometric=True)
    make = partial(T5Dataset, encoder_length=encoder_seq_length, decoder_length=decoder_seq_length)
    kind = _MaskedKind(data, seed, cut, ids, WordMasker(masking, ids.continues_v, (ids.cls, ids.sep)), make)
    return build_splits(data, kind, seed, train_valid_test_num_samples, tokenizer.vocab_size, check_tokens)


def _check_length(length: int, special: int, flag: str) -> None:
    if length < special + _LEAST_TARGET:
        raise UserError(
            f"{flag} {length} leaves no room for text beside {special} special tokens: give at least "
            f"{special + _LEAST_TARGET}"
        )


def _check_shares(mask_prob: float, short_seq_prob: float) -> None:
    if not 0 < mask_prob < 1:
        raise UserError(f"--mask-prob {mask_prob} must lie between 0 and 1, such as 0.15")
    if not 0 <= short_seq_prob <= 1:
        raise UserError(f"--short-seq-prob {short_seq_prob} must be from 0 to 1, such as 0.1")


@dataclass(frozen=True)
class _MaskedKind:
    data: DataConfig
    seed: int
    cut: Cut
    ids: WordPieceIds
    masker: WordMasker
    make: Callable[[IndexedDataset, SentenceOrder, WordPieceIds, WordMasker], MaskedDataset]

    def count(self, indexed: IndexedDataset) -> int:
        """See ``DatasetKind``: counts documents, as megatron-core does."""
        return indexed.num_documents

    def make_part(self, indexed: IndexedDataset, begin: int, end: int, name: str) -> _MaskedPart:
        documents = SentenceDocuments(indexed.lengths, indexed.doc_idx[begin : end + 1], name)
        return _MaskedPart(self, indexed, documents)


@dataclass(frozen=True)
class _MaskedPart:
    kind: _MaskedKind
    indexed: IndexedDataset
    documents: SentenceDocuments

    @property
    def name(self) -> str:
        return self.documents.name

    @property
    def is_empty(self) -> bool:
        starts_d = self.documents.starts_d
        return len(starts_d) < 2 or starts_d[0] == starts_d[-1]

    def epoch_samples(self) -> int:
        starts_d = self.documents.starts_d
        tokens = int(self.documents.lengths_s[int(starts_d[0]) : int(starts_d[-1])].sum(dtype=int))
        return tokens // self.kind.cut.most_tokens

    def dataset(self, num_samples: int | None, seed: int) -> MaskedDataset:
        kind, documents = self.kind, self.documents
        check_split(documents, kind.cut.most_tokens)
        order: SentenceOrder
        if kind.data.sample_order == "megatron":
            # The other orders already repeat a single epoch.
            cyclic = kind.data.dataloader_type == "cyclic"
            length = None if cyclic else num_samples
            identity = file_identity(self.indexed)
            cache = kind.data.data_cache_path
            order = MegatronSentences(documents, kind.cut, kind.seed, length, cache, identity)
            if cyclic:
                order = CyclicSentences(order, seed, num_samples)
        elif kind.data.sample_order == "fixed" and num_samples is not None:
            order = FixedSentences(documents, kind.cut, seed, num_samples)
        else:
            order = LazySentences(documents, kind.cut, seed, num_samples)
        if not order.epoch_samples:
            raise no_samples(documents, kind.cut)
        return kind.make(self.indexed, order, kind.ids, kind.masker)

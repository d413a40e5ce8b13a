"""BERT WordPiece tokenizers, cased and lower-cased."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.base.text_file import read_lines
from megatron.tokenizer.api import Tokenizer

_MAX_WORD = 200


@dataclass(frozen=True)
class WordPieceIds:
    """Token ids needed for masking.

    Args:
        cls, sep, pad, mask, bos, eos: ids of [CLS], [SEP], [PAD], [MASK], [BOS] and [EOS].
        sentinels: extra ids at the end of the vocabulary, T5's placeholders for removed spans.
        continues_v: bool, for every id: whether it continues a word (##...).
    """

    cls: int
    sep: int
    pad: int
    mask: int
    bos: int
    eos: int
    sentinels: range
    continues_v: NDArray[np.bool_]


def word_piece_ids(tokenizer: Tokenizer) -> WordPieceIds:
    """Token ids needed for masking.

    Raises:
        UserError: when the tokenizer lacks these ids.
    """
    if not isinstance(tokenizer, BertWordPieceTokenizer):
        raise UserError(
            f"--tokenizer-type {tokenizer.name} has no [MASK], [CLS] and [SEP] and no pieces of words: choose "
            "BertWordPieceLowerCase or BertWordPieceCase"
        )
    return tokenizer.ids


class BertWordPieceTokenizer:
    """BERT WordPiece tokenizer on top of the ``tokenizers`` library.

    If [BOS] and [EOS] are missing from the vocabulary, they get ids at its end, as in Megatron; ``extra_ids`` sentinel
    ids follow. [EOS] is the end-of-document token. Names of special tokens inside a text are plain text. If the model
    has exactly as many entries as the file, [CLS] and [SEP] serve as [BOS] and [EOS].

    Args:
        vocab_file: path of a vocab.txt with a token per line.
        lower_case: whether to lower-case the text and strip accents first.
        extra_ids: number of sentinel ids at the end of the vocabulary.
        model_size: vocabulary entries of the model, if known.

    Raises:
        UserError: when the file cannot be read, or lacks a token that BERT needs.
    """

    def __init__(self, vocab_file: Path, lower_case: bool, extra_ids: int = 0, model_size: int | None = None) -> None:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        lines = read_lines(vocab_file, "--vocab-file")
        vocab = {line: number for number, line in enumerate(lines)}
        for token in ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"):
            if token not in vocab:
                raise UserError(f"--vocab-file {vocab_file}: has no {token}, so it is not a BERT vocab.txt")
        self.name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self._encoder = Tokenizer(models.WordPiece(dict(vocab), unk_token="[UNK]", max_input_chars_per_word=_MAX_WORD))
        self._encoder.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case
        )
        self._encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._encoder.decoder = decoders.WordPiece()
        cls, sep, pad, mask = (vocab[name] for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]"))
        if model_size == len(lines):
            vocab = {"[BOS]": cls, "[EOS]": sep} | vocab
        for token in ("[BOS]", "[EOS]"):
            vocab.setdefault(token, len(lines) + sum(vocab[name] >= len(lines) for name in vocab))
        self.bos: int | None = vocab["[BOS]"]
        self.eod: int = vocab["[EOS]"]
        entries = max(vocab.values()) + 1
        self.vocab_size: int = entries + extra_ids
        continues_v = np.zeros(self.vocab_size, dtype=bool)
        continues_v[[number for token, number in vocab.items() if token.startswith("##")]] = True
        sentinels = range(entries, self.vocab_size)
        self.ids = WordPieceIds(cls, sep, pad, mask, vocab["[BOS]"], self.eod, sentinels, continues_v)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [
            list(encoding.ids) for encoding in self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, with single spaces between words."""
        return str(self._encoder.decode([int(number) for number in ids], skip_special_tokens=False))

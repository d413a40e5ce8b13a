"""Builds a tokenizer from its flags."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.api import Tokenizer, required_path
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.hugging_face import HFTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.wordpiece import BertWordPieceTokenizer


def _gpt2(flags: TokenizerConfig, name: str) -> Tokenizer:
    vocab_file = required_path(flags.vocab_file, "vocab-file", name)
    return GPT2BPETokenizer(vocab_file, required_path(flags.merge_file, "merge-file", name))


def _sentence_piece(flags: TokenizerConfig, name: str) -> Tokenizer:
    model_file = required_path(flags.tokenizer_model, "tokenizer-model", name)
    return SentencePieceTokenizer(model_file, flags.vocab_extra_ids)


def _bert(flags: TokenizerConfig, name: str) -> Tokenizer:
    vocab_file = required_path(flags.vocab_file, "vocab-file", name)
    return BertWordPieceTokenizer(vocab_file, name == "BertWordPieceLowerCase", flags.vocab_extra_ids, flags.vocab_size)


def _hugging_face(flags: TokenizerConfig, name: str) -> Tokenizer:
    return HFTokenizer(required_path(flags.tokenizer_model, "tokenizer-model", name, folder=True))


def _null(flags: TokenizerConfig, name: str) -> Tokenizer:
    if not flags.vocab_size or flags.vocab_size < 1:
        raise UserError(f"--tokenizer-type {name} needs --vocab-size, the number of ids in the text")
    return NullTokenizer(flags.vocab_size)


_BUILDERS: dict[str, Callable[[TokenizerConfig, str], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2,
    "SentencePieceTokenizer": _sentence_piece,
    "BertWordPieceLowerCase": _bert,
    "BertWordPieceCase": _bert,
    "HFTokenizer": _hugging_face,
    "NullTokenizer": _null,
}
_ALIASES = {
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "HuggingFaceTokenizer": "HFTokenizer",
}
TOKENIZER_TYPES = tuple(_BUILDERS)


def build_tokenizer(flags: TokenizerConfig) -> Tokenizer:
    """Builds the tokenizer of the flags.

    Raises:
        UserError: when the type is unknown, a flag or file is missing, or a file has another format.
    """
    if not flags.tokenizer_type:
        raise UserError(f"--tokenizer-type is missing: choose one of {', '.join(TOKENIZER_TYPES)}")
    name = _ALIASES.get(flags.tokenizer_type, flags.tokenizer_type)
    if name not in _BUILDERS:
        close_matches = difflib.get_close_matches(name, [*TOKENIZER_TYPES, *_ALIASES], n=1)
        hint = f"did you mean {close_matches[0]}? " if close_matches else ""
        raise UserError(f"--tokenizer-type {name} is not known: {hint}Choose one of {', '.join(TOKENIZER_TYPES)}")
    return _BUILDERS[name](flags, name)

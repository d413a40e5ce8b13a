"""Builds a tokenizer from its flags."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.base.user_text import nearest
from megatron.config.tokenizer import TOKENIZER_ALIASES, TOKENIZER_TYPES, TokenizerConfig
from megatron.tokenizer.api import Tokenizer, required_path
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.hugging_face import HFTokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.wordpiece import BertWordPieceTokenizer


def build_tokenizer(flags: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer of the flags.

    Raises:
        UserError: when the type is unknown, a flag or file is missing, or a file has another format.
    """
    if not flags.tokenizer_type:
        raise UserError(f"--tokenizer-type is missing: choose one of {', '.join(TOKENIZER_TYPES)}")
    name = TOKENIZER_ALIASES.get(flags.tokenizer_type, flags.tokenizer_type)
    if name not in TOKENIZER_TYPES:
        hint = nearest(name, [*TOKENIZER_TYPES, *TOKENIZER_ALIASES])
        raise UserError(f"--tokenizer-type {name} is not known{hint}; choose one of {', '.join(TOKENIZER_TYPES)}")
    if name == "NullTokenizer":
        if not flags.vocab_size or flags.vocab_size < 1:
            raise UserError(f"--tokenizer-type {name} needs --vocab-size, the number of ids in the text")
        return NullTokenizer(flags.vocab_size)
    if name == "HFTokenizer":
        return HFTokenizer(required_path(flags.tokenizer_model, "tokenizer-model", name, folder=True))
    if name == "SentencePieceTokenizer":
        model_file = required_path(flags.tokenizer_model, "tokenizer-model", name)
        return SentencePieceTokenizer(model_file, flags.vocab_extra_ids)
    vocab_file = required_path(flags.vocab_file, "vocab-file", name)
    if name == "GPT2BPETokenizer":
        return GPT2BPETokenizer(vocab_file, required_path(flags.merge_file, "merge-file", name))
    return BertWordPieceTokenizer(vocab_file, name == "BertWordPieceLowerCase", flags.vocab_extra_ids, flags.vocab_size)

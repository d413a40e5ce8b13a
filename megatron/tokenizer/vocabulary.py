"""Vocabulary size of a model."""

from __future__ import annotations

import dataclasses

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.api import Tokenizer


def model_entries(flags: TokenizerConfig, tokenizer: Tokenizer) -> int:
    """Vocabulary entries of the model before padding: --vocab-size if set, otherwise those of the tokenizer.

    Additional rows have no text, as in models that were published with padding.

    Raises:
        UserError: when --vocab-size is less than the tokenizer's vocabulary.
    """
    if flags.vocab_size is None or tokenizer.name == "NullTokenizer":  # its --vocab-size excludes the end of document
        return tokenizer.vocab_size
    if flags.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {flags.vocab_size} is less than the {tokenizer.vocab_size} entries of the tokenizer; "
            "give at least as many, or leave it out"
        )
    return flags.vocab_size


def fit_vocab_size(flags: TokenizerConfig, entries: int) -> TokenizerConfig:
    """Return the flags with --vocab-size set for a model with ``entries`` vocabulary entries."""
    null = flags.tokenizer_type == "NullTokenizer"
    return dataclasses.replace(flags, vocab_size=entries - 1 if null else entries)

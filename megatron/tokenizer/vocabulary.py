"""The number of a model's entries for a tokenizer."""

from __future__ import annotations

import dataclasses

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.api import Tokenizer, TokenizerFlags


def model_entries(flags: TokenizerFlags, tokenizer: Tokenizer) -> int:
    """Entries of the model's vocabulary before padding: the tokenizer's, or --vocab-size where that is given.

    Rows beyond the tokenizer's belong to no text, as in models that were padded where they were made.

    Raises:
        UserError: when --vocab-size is less than the tokenizer's.
    """
    if flags.vocab_size is None or tokenizer.name == "NullTokenizer":  # whose --vocab-size makes the tokenizer
        return tokenizer.vocab_size
    if flags.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {flags.vocab_size} is less than the {tokenizer.vocab_size} entries of the tokenizer; "
            "give at least as many, or leave it out"
        )
    return flags.vocab_size


def fitted(flags: TokenizerConfig, entries: int) -> TokenizerConfig:
    """The flags with the --vocab-size of a model of so many entries."""
    null = flags.tokenizer_type == "NullTokenizer"
    return dataclasses.replace(flags, vocab_size=entries - 1 if null else entries)

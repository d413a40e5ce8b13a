"""Tokenizer for texts of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import UserError


class NullTokenizer:
    """Tokenizer for token ids written as decimal numbers, separated by spaces.

    Args:
        vocab_size: number of ids in the text; the vocabulary has an additional end-of-document id.
    """

    name = "NullTokenizer"
    bos: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            UserError: when a word is not an id.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UserError("NullTokenizer: the text must be integers separated by spaces") from None
        for number in ids:
            if not 0 <= number <= self.eod:
                raise UserError(f"NullTokenizer: the id {number} is outside the vocabulary of {self.vocab_size}")
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Token ids as decimal numbers, separated by spaces."""
        return " ".join(str(int(number)) for number in ids)

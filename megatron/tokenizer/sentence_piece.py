"""SentencePiece tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError

_END_NAMES = ("<EOD>", "<eod>", "<|endoftext|>")


class SentencePieceTokenizer:
    """SentencePiece tokenizer, without begin or end tokens around a text.

    The end-of-document token is the piece <EOD>, <eod> or <|endoftext|> if the model has it, otherwise the
    end-of-sequence piece. A model with neither gets an additional id at the end of the vocabulary. ``extra_ids``
    sentinel ids follow.

    Raises:
        UserError: when the file is not a SentencePiece model.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: Path, extra_ids: int = 0) -> None:
        import sentencepiece

        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except (OSError, RuntimeError, ValueError, TypeError):
            raise UserError(f"--tokenizer-model {model_file}: is not a SentencePiece model") from None
        self._pieces: int = self._model.get_piece_size()
        self.bos: int | None = self._model.bos_id() if self._model.bos_id() >= 0 else None
        end_ids = [self._model.piece_to_id(piece) for piece in _END_NAMES]
        known_ids = [number for number in end_ids if number != self._model.unk_id() and number >= 0]
        num_added = 0
        if known_ids:
            self.eod: int = known_ids[0]
        elif self._model.eos_id() >= 0:
            self.eod = self._model.eos_id()
        else:
            self.eod, num_added = self._pieces, 1
        self.vocab_size: int = self._pieces + num_added + extra_ids

    def id_of(self, piece: str) -> int | None:
        """Id of a piece, or None."""
        number = int(self._model.piece_to_id(piece))
        return None if self._model.is_unknown(number) else number

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._model.encode(text, out_type=int))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [list(ids) for ids in self._model.encode(list(texts), out_type=int, num_threads=1)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids; ids beyond the model's pieces have no text."""
        return str(self._model.decode([int(number) for number in ids if number < self._pieces]))

"""Tokenizer and its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.base.parse_numbers import MAX_SIZE
from megatron.base.user_text import flag_of
from megatron.config.conditions import when

# Required fields by tokenizer type.
_NEEDS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "HFTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
TOKENIZER_TYPES = tuple(_NEEDS)
TOKENIZER_ALIASES = {
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "HuggingFaceTokenizer": "HFTokenizer",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer. Its type decides which files are needed."""

    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "HFTokenizer",
            "NullTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
        ]
        | None
    ) = derived(
        "none: give --vocab-size",
        "Tokenizer; of the last three, two are other names for SentencePieceTokenizer, and one for HFTokenizer.",
        checkpoint="default",
        common="data",
    )
    vocab_file: str | None = derived(
        "none",
        "Vocabulary (vocab.json, or a WordPiece vocab.txt).",
        metavar="FILE",
        aliases=("vocab",),
        contents="file",
        checkpoint="default",
        only_if=(when("tokenizer.tokenizer_type", "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),),
        common="data",
    )
    merge_file: str | None = derived(
        "none",
        "BPE merges (merges.txt).",
        metavar="FILE",
        contents="file",
        checkpoint="default",
        only_if=(when("tokenizer.tokenizer_type", "GPT2BPETokenizer"),),
        common="data",
    )
    tokenizer_model: str | None = derived(
        "none",
        "SentencePiece model, or a local Hugging Face folder.",
        metavar="PATH",
        contents="file",
        checkpoint="default",
        only_if=(
            when(
                "tokenizer.tokenizer_type",
                "SentencePieceTokenizer",
                "GPTSentencePieceTokenizer",
                "Llama2Tokenizer",
                "HFTokenizer",
                "HuggingFaceTokenizer",
            ),
        ),
        common="data",
    )
    vocab_size: int | None = derived(
        "the tokenizer's",
        "Size of the model's vocabulary before padding, at least the tokenizer's. For the NullTokenizer: the "
        "number of token IDs in the text; the vocabulary has one more.",
        unit="entries",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="default",
    )
    vocab_extra_ids: int = option(
        0,
        "Extra sentinel tokens at the end of the vocabulary.",
        unit="entries",
        minimum=0,
        maximum=MAX_SIZE,
        checkpoint="default",
        only_if=(
            when(
                "tokenizer.tokenizer_type",
                "SentencePieceTokenizer",
                "GPTSentencePieceTokenizer",
                "Llama2Tokenizer",
                "BertWordPieceLowerCase",
                "BertWordPieceCase",
            ),
        ),
    )

    def with_type(self) -> TokenizerConfig:
        """Fill an unset type from the files: GPT-2 for a vocabulary with merges."""
        if self.tokenizer_type is None and self.vocab_file is not None and self.merge_file is not None:
            return replace(self, tokenizer_type="GPT2BPETokenizer")
        return self


def check_tokenizer(tokenizer: TokenizerConfig, model_type: str) -> None:
    """Check that the tokenizer has the files and the extra ids that are needed; raise UserError otherwise."""
    kind = tokenizer.tokenizer_type
    needed = () if kind is None else _NEEDS[TOKENIZER_ALIASES.get(kind, kind)]
    missing = [flag_of(name) for name in needed if getattr(tokenizer, name) is None]
    if missing:
        raise UserError(
            f"--tokenizer-type {kind} needs {' and '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"
        )
    if model_type == "t5" and kind not in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        raise UserError("T5 masks whole words: give --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase")
    if model_type == "t5" and not tokenizer.vocab_extra_ids:
        raise UserError("T5 marks removed spans with extra ids: give --vocab-extra-ids 100")

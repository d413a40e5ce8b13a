"""Interfaces of tokenizers and of their flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from megatron.base.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer. No method adds or strips special tokens, truncates or pads."""

    @property
    def name(self) -> str:
        """Value of --tokenizer-type."""

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids. The model pads it for tensor parallelism."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""

    @property
    def bos(self) -> int | None:
        """Id of the begin-of-sequence token, or None."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts; faster than a loop over ``tokenize``."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids."""


def start_token(tokenizer: Tokenizer) -> int:
    """Start token of generation without a prompt: begin-of-sequence if available, otherwise end-of-document."""
    return tokenizer.eod if tokenizer.bos is None else tokenizer.bos


@runtime_checkable
class PieceLookup(Protocol):
    """A tokenizer that can look up pieces by name."""

    def id_of(self, piece: str) -> int | None:
        """Id of a piece, or None."""


class TokenizerFlags(Protocol):
    """Fields of the tokenizer section."""

    @property
    def tokenizer_type(self) -> str | None:
        """Name of the tokenizer's type."""

    @property
    def vocab_file(self) -> str | None:
        """Path of a vocab.json or a WordPiece vocab.txt."""

    @property
    def merge_file(self) -> str | None:
        """Path of a BPE merges.txt."""

    @property
    def tokenizer_model(self) -> str | None:
        """Path of a SentencePiece model or a Hugging Face folder."""

    @property
    def vocab_size(self) -> int | None:
        """Number of vocabulary entries of the model; for the NullTokenizer, number of ids in the text."""

    @property
    def vocab_extra_ids(self) -> int:
        """Number of extra ids at the end of the vocabulary."""


def required_path(value: str | None, flag: str, tokenizer: str, *, folder: bool = False) -> Path:
    """Checks the path of a flag.

    Raises:
        UserError: when the flag is missing, or the file or folder does not exist.
    """
    if not value:
        raise UserError(f"--tokenizer-type {tokenizer} needs --{flag}")
    path = Path(value)
    if not (path.is_dir() if folder else path.is_file()):
        raise UserError(f"--{flag} {value}: no such {'folder' if folder else 'file'}. Check the path")
    return path

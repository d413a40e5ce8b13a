"""The interface of tokenizers, and the flags that they are built from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from megatron.base.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer: text to ids and back. No method adds or strips special tokens, truncates or pads."""

    @property
    def name(self) -> str:
        """The type, as --tokenizer-type spells it."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of the ids. Padding for tensor parallelism is left to the model."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""

    @property
    def bos(self) -> int | None:
        """Id of the begin-of-sequence token, where the vocabulary has one."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts: the same as one by one, but faster."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids."""


def start_token(tokenizer: Tokenizer) -> int:
    """The token that a text without a prompt starts from: the begin-of-sequence token, or else the end of document."""
    return tokenizer.eod if tokenizer.bos is None else tokenizer.bos


@runtime_checkable
class PieceLookup(Protocol):
    """A tokenizer that knows its pieces by name."""

    def id_of(self, piece: str) -> int | None:
        """The id of a piece, where there is one."""


class TokenizerFlags(Protocol):
    """The fields of the tokenizer section."""

    @property
    def tokenizer_type(self) -> str | None:
        """Name of the tokenizer's type."""

    @property
    def vocab_file(self) -> str | None:
        """Path of vocab.json, or of a WordPiece vocab.txt."""

    @property
    def merge_file(self) -> str | None:
        """Path of BPE's merges.txt."""

    @property
    def tokenizer_model(self) -> str | None:
        """Path of a SentencePiece model, or of a Hugging Face folder."""

    @property
    def vocab_size(self) -> int | None:
        """Number of entries of the model; for the NullTokenizer, of ids in the text."""

    @property
    def vocab_extra_ids(self) -> int:
        """Number of extra ids at the end of the vocabulary."""


def required_path(value: str | None, flag: str, tokenizer: str, *, folder: bool = False) -> Path:
    """Checks the path of a flag.

    Raises:
        UserError: when it is not given, or there is no such file (folder).
    """
    if not value:
        raise UserError(f"--tokenizer-type {tokenizer} needs --{flag}")
    path = Path(value)
    if not (path.is_dir() if folder else path.is_file()):
        raise UserError(f"--{flag} {value}: no such {'folder' if folder else 'file'}. Check the path")
    return path

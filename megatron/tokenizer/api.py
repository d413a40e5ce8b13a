"""Interface of tokenizers."""

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


def required_path(value: str | None, flag: str, tokenizer: str, *, folder: bool = False) -> Path:
    """Check the path of a flag.

    Raises:
        UserError: when the flag is missing, or the file or folder does not exist.
    """
    if not value:
        raise UserError(f"--tokenizer-type {tokenizer} needs --{flag}")
    path = Path(value)
    if not (path.is_dir() if folder else path.is_file()):
        raise UserError(f"--{flag} {value}: no such {'folder' if folder else 'file'}. Check the path")
    return path

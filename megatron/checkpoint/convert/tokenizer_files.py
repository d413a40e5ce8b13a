"""A tokenizer's files: finds and copies them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer

_FILES = (
    "vocab.json", "merges.txt", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "spm.model",
)  # fmt: skip


_SENTENCE_PIECE = ("tokenizer.model", "spm.model")
"""Names of SentencePiece models: most architectures', and DeBERTa's."""


def tokenizer_beside(*folders: Path) -> TokenizerConfig:
    """The tokenizer whose files are in the first of some folders that has any."""
    for folder in folders:
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        pair = vocab.is_file() and merges.is_file()
        if pair and _is_gpt2s(folder):
            return TokenizerConfig(
                tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab.resolve()), merge_file=str(merges.resolve())
            )
        if pair or (folder / "tokenizer.json").is_file():
            return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder.resolve()))
        for name in _SENTENCE_PIECE:
            if not (folder / name).is_file():
                continue
            model = str((folder / name).resolve())
            return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    return TokenizerConfig()


def _is_gpt2s(folder: Path) -> bool:
    """Whether vocab.json and merges.txt are to be used as GPT-2 does; Qwen2, for one, cuts words in another way."""
    named = _text_in(folder / "tokenizer_config.json", "tokenizer_class")
    if named:
        return named.startswith("GPT2Tokenizer")
    return not (folder / "tokenizer.json").is_file() or _text_in(folder / "config.json", "model_type") == "gpt2"


def _text_in(path: Path, name: str) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    value = content.get(name) if isinstance(content, dict) else None
    return value if isinstance(value, str) else ""


def built(tokenizer: TokenizerConfig, entries: int) -> Tokenizer | None:
    """Builds the tokenizer, whose files must fit a model of so many entries; None where there is none.

    What cannot be read as a tokenizer is not copied: a checkpoint of somebody else may name any file.

    Raises:
        UserError: when they cannot.
    """
    if tokenizer.tokenizer_type is None:
        return None
    try:
        found = build_tokenizer(tokenizer)
    except UserError as error:
        raise UserError(f"{error}; or convert without the tokenizer (--no-tokenizer)") from error
    if found.vocab_size > entries:
        raise UserError(
            f"the tokenizer has {found.vocab_size} entries, the model {entries}: it is another model's; "
            "name the right one, or convert without it (--no-tokenizer)"
        )
    return found


def copy_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> None:
    """Copies the files of a tokenizer, under the names that ``transformers`` looks for.

    Raises:
        UserError: when one of them is not what its name says.
    """
    named = {"vocab.json": tokenizer.vocab_file, "merges.txt": tokenizer.merge_file}
    model = Path(tokenizer.tokenizer_model) if tokenizer.tokenizer_model else None
    if model is not None and model.is_dir():
        named |= {name: str(model / name) for name in _FILES if (model / name).is_file()}
    elif model is not None:
        named[model.name if model.name in _SENTENCE_PIECE else _SENTENCE_PIECE[0]] = str(model)
    for name, source in named.items():
        if source:
            if name.endswith(".json"):
                _check_json(Path(source))
            shutil.copyfile(source, folder / name)
    if tokenizer.tokenizer_type == "GPT2BPETokenizer":
        text = json.dumps({"tokenizer_class": "GPT2Tokenizer"}, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: is not JSON; put it right, or convert without the tokenizer (--no-tokenizer)"
        ) from error

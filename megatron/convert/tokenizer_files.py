"""Finds and copies the files of a tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.base.text_file import read_json_object
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer.api import Tokenizer, start_token
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.gpt2 import END_OF_TEXT
from megatron.tokenizer.special_tokens import ADDED, CONFIG, MAP, read_special_tokens
from megatron.tokenizer.vocabulary import fit_vocab_size

_SENTENCE_PIECE = ("tokenizer.model", "spm.model")
"""File names of SentencePiece models: of most architectures, and of DeBERTa."""
_FILES = (
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.json", *_SENTENCE_PIECE, CONFIG, MAP, ADDED,
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files of a Hugging Face folder that belong to its tokenizer, and generation_config.json with its end ids."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def find_tokenizer(*folders: Path) -> TokenizerConfig:
    """Tokenizer configuration from the first folder that has tokenizer files."""
    for folder in folders:
        vocab, merges, word_pieces = folder / "vocab.json", folder / "merges.txt", folder / "vocab.txt"
        pair = vocab.is_file() and merges.is_file()
        if pair and _is_plain_gpt2(folder):
            return TokenizerConfig(
                tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab.resolve()), merge_file=str(merges.resolve())
            )
        lower_case = _is_lower_case(folder) if word_pieces.is_file() else None
        if lower_case is not None:
            bert = TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(word_pieces.resolve()))
            return replace(bert, tokenizer_type="BertWordPieceLowerCase") if lower_case else bert
        model = folder / _SENTENCE_PIECE[0]
        has_config = model.is_file() and any((folder / name).is_file() for name in (CONFIG, MAP, ADDED))
        if pair or has_config or (folder / "tokenizer.json").is_file():
            return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder.resolve()))
        for name in _SENTENCE_PIECE:
            if (folder / name).is_file():
                return TokenizerConfig(
                    tokenizer_type="SentencePieceTokenizer", tokenizer_model=str((folder / name).resolve())
                )
    return TokenizerConfig()


def _is_plain_gpt2(folder: Path) -> bool:
    """Whether vocab.json and merges.txt define the tokenizer: GPT-2's pre-tokenization, and its only special token.

    Qwen2, for example, uses another pre-tokenization.
    """
    special = read_special_tokens(folder)
    content = read_json_object(folder / "tokenizer.json")
    listed = content.get("added_tokens")
    tokens = [token for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    added = {str(token.get("content")) for token in tokens}
    if {*special.names, *added} - {END_OF_TEXT} or special.config.get("add_prefix_space") is True:
        return False
    named = special.config.get("tokenizer_class")
    if isinstance(named, str):
        return named.startswith("GPT2Tokenizer")
    return (
        not (folder / "tokenizer.json").is_file()
        or read_json_object(folder / "config.json").get("model_type") == "gpt2"
    )


def _is_lower_case(folder: Path) -> bool | None:
    """Whether a BERT's vocab.txt is lower-case; None if it does not fully define the tokenizer."""
    special = read_special_tokens(folder)
    config = special.config
    named = config.get("tokenizer_class")
    if isinstance(named, str):
        if named not in ("BertTokenizer", "BertTokenizerFast"):
            return None
    elif (folder / "tokenizer.json").is_file() and "bert" not in str(
        read_json_object(folder / "config.json").get("model_type")
    ):
        return None
    normalizer = read_json_object(folder / "tokenizer.json").get("normalizer")
    fallback = normalizer.get("lowercase", True) if isinstance(normalizer, dict) else True
    lower_case = config.get("do_lower_case", fallback) is not False
    is_standard = (
        config.get("strip_accents") in (None, lower_case) and config.get("tokenize_chinese_chars") is not False
    )
    words = set((folder / "vocab.txt").read_text(encoding="utf-8", errors="replace").split("\n"))
    return lower_case if is_standard and not set(special.names) - words else None


def build_fitting_tokenizer(tokenizer: TokenizerConfig, entries: int) -> Tokenizer | None:
    """Build the tokenizer, which must fit a model of ``entries`` vocabulary entries; None without a tokenizer.

    Otherwise, a foreign checkpoint could have any file copied as its tokenizer.

    Raises:
        UserError: when the tokenizer cannot be built, or does not fit.
    """
    if tokenizer.tokenizer_type is None:
        return None
    try:
        fitting_tokenizer = build_tokenizer(fit_vocab_size(tokenizer, entries))
    except UserError as error:
        raise UserError(f"{error}; or convert without the tokenizer (--no-tokenizer)") from error
    if fitting_tokenizer.vocab_size > entries:
        raise UserError(
            f"the tokenizer has {fitting_tokenizer.vocab_size} entries, the model {entries}: it belongs to another "
            "model; name the right one, or convert without it (--no-tokenizer)"
        )
    return fitting_tokenizer


def special_ids(tokenizer: TokenizerConfig, entries: int) -> dict[str, Any]:
    """Special-token ids for config.json: from the config.json in the tokenizer's folder, else from the tokenizer.

    Args:
        tokenizer: configuration of the tokenizer.
        entries: vocabulary entries of the model.
    """
    fitting_tokenizer = build_fitting_tokenizer(tokenizer, entries)
    ids: dict[str, Any] = {}
    if fitting_tokenizer is not None:
        ids = {"bos_token_id": start_token(fitting_tokenizer), "eos_token_id": fitting_tokenizer.eod}
    tokenizer_folder = _transformers_folder(tokenizer)
    config = {} if tokenizer_folder is None else read_json_object(tokenizer_folder / "config.json")
    for name in _IDS:
        value = config.get(name)
        numbers = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if name in config and all(
            number is None or (isinstance(number, int) and not isinstance(number, bool) and 0 <= number < entries)
            for number in numbers
        ):
            ids[name] = value
    return ids


def copy_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> None:
    """Copy the files of a tokenizer, under the names that ``transformers`` looks for.

    Raises:
        UserError: when a file's content does not match its name.
    """
    tokenizer_folder = _transformers_folder(tokenizer)
    if tokenizer_folder is not None:
        sources = {name: tokenizer_folder / name for name in _FILES if (tokenizer_folder / name).is_file()}
    else:
        sources = {name: Path(path) for name, path in _named_files(tokenizer).items() if path}
    for name, source in sources.items():
        try:
            text = source.read_text(encoding="utf-8") if name.endswith((".json", ".jinja")) else ""
            if name.endswith(".json"):
                json.loads(text)
            elif name.endswith(".jinja") and "{{" not in text and "{%" not in text:
                raise ValueError
        except (ValueError, RecursionError) as error:
            expected = "JSON" if name.endswith(".json") else "a template"
            raise UserError(
                f"{source}: is not {expected}; correct it, or convert without the tokenizer (--no-tokenizer)"
            ) from error
        shutil.copyfile(source, folder / name)
    config = _WRITTEN_CONFIGS.get(tokenizer.tokenizer_type or "")
    if config is not None and not (folder / CONFIG).exists():
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


_WRITTEN_CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2BPETokenizer": {"tokenizer_class": "GPT2Tokenizer"},
    "BertWordPieceLowerCase": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
    "BertWordPieceCase": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
}
"""tokenizer_config.json of a tokenizer that comes without it."""


def _transformers_folder(tokenizer: TokenizerConfig) -> Path | None:
    """The folder with a tokenizer's files under the names of ``transformers``; None if they are elsewhere."""
    path = Path(tokenizer.tokenizer_model or tokenizer.vocab_file or "")
    folder = path if path.is_dir() else path.parent
    if tokenizer.tokenizer_type in ("HFTokenizer", "HuggingFaceTokenizer"):
        return folder
    files = {name: Path(file).resolve() for name, file in _named_files(tokenizer).items() if file}
    if not files or any((folder / name).resolve() != file for name, file in files.items()):
        return None
    # Other files there may turn GPT-2's or BERT's files into another tokenizer, but not a SentencePiece model.
    return folder if tokenizer.tokenizer_model or find_tokenizer(folder).vocab_file else None


def _named_files(tokenizer: TokenizerConfig) -> dict[str, str | None]:
    """Paths of a tokenizer's files by their names in a Hugging Face folder."""
    if tokenizer.tokenizer_model:
        name = Path(tokenizer.tokenizer_model).name
        return {name if name in _SENTENCE_PIECE else _SENTENCE_PIECE[0]: tokenizer.tokenizer_model}
    if (tokenizer.tokenizer_type or "").startswith("Bert"):
        return {"vocab.txt": tokenizer.vocab_file}
    if tokenizer.vocab_file:
        return {"vocab.json": tokenizer.vocab_file, "merges.txt": tokenizer.merge_file}
    return {}

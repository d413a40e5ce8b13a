"""Any tokenizer of a local Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class HFTokenizer:
    """The tokenizer.json of a folder through the ``tokenizers`` library, else the folder through
    ``transformers``.

    Nothing is downloaded and no code from the folder is run. The end of a document is the folder's eos_token.

    Args:
        folder: a folder, as ``save_pretrained`` writes it.

    Raises:
        UserError: when the folder has no tokenizer, or its end token is unknown.
    """

    name = "HFTokenizer"

    def __init__(self, folder: Path) -> None:
        self._fast: Any = None
        self._slow: Any = None
        if (folder / "tokenizer.json").is_file():
            self._fast = _load_fast(folder)
            vocab: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        else:
            self._slow = _load_slow(folder)
            vocab = self._slow.get_vocab()
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self._ids = vocab
        names = _special_names(folder)
        end = names.get("eos_token") or next((name for name in _END_NAMES if name in vocab), None)
        if end is None or end not in vocab:
            raise UserError(f"--tokenizer-model {folder}: no end of document. Set eos_token in tokenizer_config.json")
        self.eod: int = vocab[end]
        self.bos: int | None = vocab.get(names.get("bos_token", ""))

    def id_of(self, piece: str) -> int | None:
        """The id of a piece, where there is one."""
        return self._ids.get(piece)

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts."""
        if self._fast is not None:
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [list(encoding.ids) for encoding in encodings]
        return [list(self._slow.encode(text, add_special_tokens=False)) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        numbers = [int(number) for number in ids]
        return str((self._fast or self._slow).decode(numbers, skip_special_tokens=False))


def _load_fast(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer-model {folder}: its tokenizer.json cannot be read ({error})") from None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _load_slow(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            f"--tokenizer-model {folder}: has no tokenizer.json; install transformers to read its other files"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many kinds, by tokenizer class
        first_line = str(error).split("\n")[0]
        raise UserError(f"--tokenizer-model {folder}: holds no tokenizer ({first_line})") from None


def _special_names(folder: Path) -> dict[str, str]:
    """Special tokens of the folder (eos_token, bos_token ...); each may be a string or an object with ``content``."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key, value in content.items() if isinstance(content, dict) else ():
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                names[key] = token
    return names

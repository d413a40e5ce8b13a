"""Tokenizers of local Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError, first_line
from megatron.tokenizer.special_tokens import SpecialTokens, read_special_tokens

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class HFTokenizer:
    """Tokenizer of a Hugging Face folder: tokenizer.json with ``tokenizers``, other files with ``transformers``.

    Nothing is downloaded, and no code from the folder is run. The ids equal those of ``transformers``: the vocabulary
    includes tokens that only tokenizer_config.json or added_tokens.json list, and special tokens inside a text are
    parsed. The end-of-document token is the folder's eos_token.

    Args:
        folder: a folder written by ``save_pretrained``.

    Raises:
        UserError: when the folder has no tokenizer, or its end token is unknown.
    """

    name = "HFTokenizer"

    def __init__(self, folder: Path) -> None:
        special = read_special_tokens(folder)
        self._encoder: Any = None
        self._slow: Any = None
        by_kind = dict(special.by_kind)
        if (folder / "tokenizer.json").is_file():
            self._encoder = _load_encoder(folder, special)
        else:
            try:
                from transformers import AutoTokenizer
            except ImportError:
                raise UserError(
                    f"--tokenizer-model {folder}: has no tokenizer.json; install transformers to read its other files"
                ) from None
            try:
                self._slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            except Exception as error:  # many kinds, by tokenizer class
                raise UserError(f"--tokenizer-model {folder}: holds no tokenizer ({first_line(error)})") from None
            self._encoder = getattr(self._slow, "backend_tokenizer", None)
            by_kind |= {kind: str(token) for kind in ("bos_token", "eos_token") if (token := getattr(self._slow, kind))}
        if self._encoder is not None:
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._ids: dict[str, int] = self._encoder.get_vocab(with_added_tokens=True)
        else:
            self._ids = self._slow.get_vocab()
        self.vocab_size: int = max(self._ids.values(), default=-1) + 1
        end = by_kind.get("eos_token") or next((name for name in _END_NAMES if name in self._ids), None)
        if end is None or end not in self._ids:
            raise UserError(
                f"--tokenizer-model {folder}: no end-of-document token; set eos_token in tokenizer_config.json"
            )
        self.eod: int = self._ids[end]
        self.bos: int | None = self._ids.get(by_kind.get("bos_token", ""))

    def id_of(self, piece: str) -> int | None:
        """Id of a piece, or None."""
        return self._ids.get(piece)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        if self._encoder is not None:
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
            return [list(encoding.ids) for encoding in encodings]
        return [list(self._slow.encode(text, add_special_tokens=False)) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        numbers = [int(number) for number in ids]
        return str((self._slow or self._encoder).decode(numbers, skip_special_tokens=False))


def _load_encoder(folder: Path, special: SpecialTokens) -> Any:
    """Load tokenizer.json, and add the tokens of the folder's other files.

    Raises:
        UserError: when tokenizer.json cannot be read, or assigns other ids than the other files.
    """
    from tokenizers import AddedToken, Tokenizer

    try:
        encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer-model {folder}: its tokenizer.json cannot be read ({error})") from None
    present = {token.content: token for token in encoder.get_added_tokens_decoder().values()}
    tokens = [AddedToken(**special.added[number]) for number in sorted(special.added)]
    tokens += [
        AddedToken(name, special=True)
        for name in dict.fromkeys([*special.by_kind.values(), *special.other_tokens])
        if name not in present and all(token.content != name for token in tokens)
    ]
    encoder.add_tokens([token for token in tokens if repr(token) != repr(present.get(token.content))])
    for number, token in sorted(special.added.items()):
        if encoder.token_to_id(token["content"]) != number:
            raise UserError(
                f"--tokenizer-model {folder}: gives {token['content']} the id {number}, but its tokenizer.json gives "
                f"it {encoder.token_to_id(token['content'])}; correct the files"
            )
    encoder.encode_special_tokens = special.config.get("split_special_tokens") is True
    prefix = special.config.get("add_prefix_space")
    if isinstance(prefix, bool) and str(special.config.get("tokenizer_class", "")).startswith("GPT2Tokenizer"):
        if not hasattr(encoder.pre_tokenizer, "add_prefix_space"):
            raise UserError(
                f"--tokenizer-model {folder}: add_prefix_space is given, but the pre_tokenizer of its tokenizer.json "
                "is not that of GPT-2; correct the files"
            )
        encoder.pre_tokenizer.add_prefix_space = prefix
    return encoder

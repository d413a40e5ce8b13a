"""Special and added tokens in the JSON files of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.base.text_file import read_json_object

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_KINDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_DIGITS = 9
"""Maximum digits of a token id."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which UTF-8 cannot encode."""
_LISTS = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens of a folder, as ``transformers`` reads them.

    Args:
        by_kind: special tokens by kind (bos_token, eos_token ...).
        added: added tokens by id, each with the arguments of ``tokenizers.AddedToken``.
        other_tokens: special tokens without a kind.
        config: content of tokenizer_config.json.
    """

    by_kind: Mapping[str, str]
    added: Mapping[int, Mapping[str, Any]]
    other_tokens: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """All tokens; tokens with an id come first, in id order."""
        added_names = [self.added[number]["content"] for number in sorted(self.added)]
        return list(dict.fromkeys([*added_names, *self.by_kind.values(), *self.other_tokens]))


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the tokens in a folder's JSON files.

    If tokenizer_config.json lists added tokens, the two older files are ignored.

    Raises:
        UserError: when an added token has no text or no id.
    """
    config = read_json_object(folder / CONFIG)
    added_entries = config.get("added_tokens_decoder")
    words = dict(config) if isinstance(added_entries, dict) else {**config, **read_json_object(folder / MAP)}
    by_kind = {kind: text for kind in _KINDS if (text := _text_of(words.get(kind))) is not None}
    other_entries: list[Any] = []
    for name in _LISTS:
        entries = words.get(name)
        other_entries += entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ()
    other_tokens = tuple(text for entry in other_entries if (text := _text_of(entry)) is not None)
    if isinstance(added_entries, dict):
        added_tokens = dict(_checked_tokens(added_entries.items(), folder / CONFIG))
    else:
        special = {*by_kind.values(), *other_tokens}
        pairs = (
            (number, {"content": text, "special": text in special, "normalized": text not in special})
            for text, number in read_json_object(folder / ADDED).items()
        )
        added_tokens = dict(_checked_tokens(pairs, folder / ADDED))
    return SpecialTokens(by_kind, added_tokens, other_tokens, config)


def _checked_tokens(pairs: Any, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    for number, token in pairs:
        text = _text_of(token)
        if not text or not (isinstance(number, int) or (str(number).isdecimal() and len(number) <= _MAX_DIGITS)):
            raise UserError(f"{path}: its added token {number!r} needs an id and a text; correct the file")
        yield int(number), {"content": text, **{name: bool(token[name]) for name in flags if name in token}}


def _text_of(value: Any) -> str | None:
    """Text of a token, which may be a string or an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and not _SURROGATE.search(text) else None

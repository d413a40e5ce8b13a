"""GPT-2 byte-level BPE."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError

END_OF_TEXT = "<|endoftext|>"

# Before merging bytes, GPT-2 splits a text into words: contractions; letters, digits or other characters with an
# optional leading space; and white space. These are its rules for ASCII, where the character classes of Python's ``re``
# and of the ``tokenizers`` library do not depend on their Unicode versions.
_SPACE = r" \t\n\r\x0b\x0c"
_WORD = re.compile(
    rf"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^{_SPACE}A-Za-z0-9]+"
    rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")
# White space after a printable ASCII character always starts a new word, so a text may be split there.
_CUT = re.compile(rf"(?<=[!-~])(?=[{_SPACE}])")
_SPACES = frozenset(" \t\n\r\x0b\x0c")
# GPT-2 vocabulary characters of the non-printable ASCII bytes, space included; other ASCII bytes are unchanged.
_BYTE_SIGNS = {**{byte: chr(256 + byte) for byte in range(33)}, 127: chr(256 + 33)}
# Above this ratio of non-ASCII runs to characters, the library alone is faster.
_MAX_RUN_RATIO = 0.02
# Maximum number of cached words; English text has about 10^5 recurring words.
_CACHE_WORDS = 1 << 20


class _WordIds(dict[str, tuple[int, ...]]):
    """Cache of word ids; missing words are tokenized on access."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self._encoder = encoder
        self._model = encoder.model

    def __missing__(self, word: str) -> tuple[int, ...]:
        if word.isascii():
            ids = tuple([token.id for token in self._model.tokenize(word.translate(_BYTE_SIGNS))])
        else:
            ids = tuple(self._encoder.encode(word, add_special_tokens=False).ids)
        if len(self) >= _CACHE_WORDS:
            self.clear()
        self[word] = ids
        return ids


class GPT2BPETokenizer:
    """GPT-2 tokenizer on top of the ``tokenizers`` library.

    The ids equal those of Hugging Face's GPT2TokenizerFast, with a deliberate exception, as in Megatron:
    "<|endoftext|>" inside a text is plain text, so a document cannot end itself.

    Word ids are cached: the library only tokenizes new words and non-ASCII runs. Texts with many such runs go directly
    to the library.

    Raises:
        UserError: when the library cannot read the files, or the vocabulary has no "<|endoftext|>".
    """

    name = "GPT2BPETokenizer"
    bos: int | None = None

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        try:
            model = models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"--vocab-file {vocab_file}, --merge-file {merge_file}: not GPT-2's vocab.json and merges.txt ({error})"
            ) from None
        self._encoder = Tokenizer(model)
        self._encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._encoder.decoder = decoders.ByteLevel()
        eod = self._encoder.token_to_id(END_OF_TEXT)
        if eod is None:
            raise UserError(f"--vocab-file {vocab_file}: has no {END_OF_TEXT} entry to end documents; add it")
        self.eod: int = eod
        self.vocab_size: int = max(self._encoder.get_vocab().values()) + 1
        self._word_ids = _WordIds(self._encoder)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [self._tokenize_ascii(text) if text.isascii() else self._tokenize_mixed(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids; invalid UTF-8 becomes replacement characters."""
        return str(self._encoder.decode(list(ids), skip_special_tokens=False))

    def _tokenize_ascii(self, text: str) -> list[int]:
        return list(chain.from_iterable(map(self._word_ids.__getitem__, _WORD.findall(text))))

    def _tokenize_mixed(self, text: str) -> list[int]:
        runs = _NON_ASCII.findall(text)
        if len(runs) > _MAX_RUN_RATIO * len(text):
            return list(self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        ids: list[int] = []
        position = 0
        for match in _NON_ASCII.finditer(text):
            if match.start() < position:
                continue
            # The section around a non-ASCII run, from the last possible split before it to the first after it.
            start = match.start()
            while start > position and not (text[start] in _SPACES and "!" <= text[start - 1] <= "~"):
                start -= 1
            cut = _CUT.search(text, match.end())
            end = len(text) if cut is None else cut.start()
            ids += self._tokenize_ascii(text[position:start])
            ids += self._word_ids[text[start:end]]
            position = end
        return ids + self._tokenize_ascii(text[position:])

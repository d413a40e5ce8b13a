"""Encoding of JSON lines into token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.base.text_file import parse_json
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.idx_format import best_dtype
from megatron.data.lines import BYTE_ORDER_MARK
from megatron.data.preprocess.reading import Block, InputRange
from megatron.data.preprocess.sentences import sentence_splitter
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer


@dataclass(frozen=True)
class EncodeOptions:
    """Encoding options: the tokenizer, and flags by name."""

    json_keys: tuple[str, ...]
    tokenizer: TokenizerConfig
    append_eod: bool
    split_sentences: bool
    keep_newlines: bool
    lang: str


@dataclass(frozen=True)
class BadLine:
    """A line that is not a document: its index in the source, from 0, and the reason."""

    index: int
    reason: str


@dataclass(frozen=True)
class KeyTokens:
    """Encoded documents of a key: ids [T], tokens per sequence, and sequences per document."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]


@dataclass(frozen=True)
class Encoded:
    """An encoded block."""

    source: InputRange
    size: int
    documents: int
    by_key: list[KeyTokens]
    bad: list[BadLine] = field(default_factory=list)


def parse_line(line: bytes, keys: Sequence[str], *, first: bool = False) -> list[str] | None:
    """Parse a line; return the texts of the keys, or None for a blank line.

    Args:
        line: a line of JSON.
        keys: keys of the texts.
        first: whether it is the first line of its file, which may start with a byte order mark.

    Raises:
        ValueError: when the line is bad; the message states the reason.
    """
    if first:
        line = line.removeprefix(BYTE_ORDER_MARK)
    if line.isspace() or not line:
        return None
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    try:
        value = parse_json(text)
    except RecursionError:
        raise ValueError("broken JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"broken JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {_json_type(value)} where an object belongs")
    texts = []
    for key in keys:
        if key not in value:
            raise ValueError(f"no key {key!r} (there are: {', '.join(map(repr, list(value)[:8])) or 'none'})")
        key_text = value[key]
        if not isinstance(key_text, str):
            raise ValueError(f"the key {key!r} holds a JSON {_json_type(key_text)} where a string belongs")
        texts.append(key_text)
    if "\\ud" in text or "\\uD" in text:
        for key_text in texts:
            try:
                key_text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"half of a surrogate pair at character {error.start + 1} of the text") from None
    return texts


class Encoder:
    """Encoder of blocks of lines; each process builds its own tokenizer."""

    def __init__(self, options: EncodeOptions) -> None:
        self.options = options

    def __reduce__(self) -> tuple[type[Encoder], tuple[EncodeOptions]]:
        return Encoder, (self.options,)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the texts."""
        return build_tokenizer(self.options.tokenizer)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the token ids."""
        return best_dtype(self.tokenizer.vocab_size)

    @cached_property
    def _split(self) -> Callable[[str], list[str]] | None:
        options = self.options
        return sentence_splitter(options.lang, options.keep_newlines) if options.split_sentences else None

    def __call__(self, block: Block) -> Encoded:
        """Encode a block; lines that are not documents are listed as bad, and blank lines are skipped."""
        bad: list[BadLine] = []
        documents: list[tuple[int, list[str]]] = []
        for index, line in enumerate(block.lines, start=block.first):
            try:
                texts = parse_line(line, self.options.json_keys, first=not (index or block.source.start))
            except ValueError as error:
                bad.append(BadLine(index, str(error)))
                continue
            if texts is not None:
                documents.append((index, texts))
        try:
            by_key = self._encode([texts for _, texts in documents])
        except UserError:
            encodable_documents = []
            for index, texts in documents:
                try:
                    self._encode([texts])
                except UserError as error:
                    bad.append(BadLine(index, str(error)))
                else:
                    encodable_documents.append((index, texts))
            documents = encodable_documents
            by_key = self._encode([texts for _, texts in documents])
        bad.sort(key=lambda line: line.index)
        return Encoded(block.source, block.size, len(documents), by_key, bad)

    def _encode(self, documents: list[list[str]]) -> list[KeyTokens]:
        by_key = []
        for key_index in range(len(self.options.json_keys)):
            texts = [document[key_index] for document in documents]
            sentences = texts if self._split is None else []
            counts = [1] * len(texts)
            if self._split is not None:
                for number, text in enumerate(texts):
                    text_sentences = self._split(text)
                    counts[number] = len(text_sentences)
                    sentences += text_sentences
            ids = iter(self.tokenizer.tokenize_batch(sentences))
            sequences: list[list[int]] = []
            sentence_counts = np.zeros(len(texts), dtype=np.int32)
            for number, count in enumerate(counts):
                # Sentences without tokens are dropped, and documents without tokens get no end-of-document token.
                document_sentences = [sentence for sentence in (next(ids) for _ in range(count)) if sentence]
                if document_sentences and self.options.append_eod:
                    document_sentences[-1].append(self.tokenizer.eod)
                sentence_counts[number] = len(document_sentences)
                sequences += document_sentences
            lengths = np.fromiter(map(len, sequences), dtype=np.int32, count=len(sequences))
            total = int(lengths.sum(dtype=np.int64))
            tokens = np.fromiter(chain.from_iterable(sequences), dtype=self.dtype, count=total)
            by_key.append(KeyTokens(tokens, lengths, sentence_counts))
        return by_key


def _json_type(value: object) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")

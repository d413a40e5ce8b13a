"""Small files of sentences, a vocabulary of word pieces, and flags of datasets over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.config.tokenizer import TokenizerConfig
from megatron.data.indexed import IndexedWriter
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.wordpiece import BertWordPieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENS = [*SPECIAL, *(f"w{number}" for number in range(60)), *(f"##p{number}" for number in range(30))]
FIRST_WORD = len(SPECIAL)


def tokenizer(folder: Path, extra_ids: int = 0) -> BertWordPieceTokenizer:
    """A tokenizer of 60 words and 30 pieces."""
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join(TOKENS))
    wordpiece = build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(vocab), vocab_extra_ids=extra_ids)
    )
    assert isinstance(wordpiece, BertWordPieceTokenizer)
    return wordpiece


def all_tokens(extra_ids: int) -> list[str]:
    """The vocabulary by id, with the tokenizer's additions."""
    return [*TOKENS, "[BOS]", "[EOS]", *(f"<extra_id_{number}>" for number in range(extra_ids))]


def write_sentences(prefix: Path, documents: list[list[int]], seed: int = 0) -> str:
    """Write documents of sentences of these lengths, of random words and pieces."""
    random = np.random.RandomState(seed)
    with IndexedWriter(prefix, dtype=np.dtype("uint16")) as writer:
        for lengths in documents:
            writer.add_document(random.randint(FIRST_WORD, len(TOKENS), size=sum(lengths)), lengths)
    return str(prefix)


def random_documents(count: int, seed: int, most_sentences: int = 14) -> list[list[int]]:
    """Documents of 0 to 13 sentences, some too long, and a long document."""
    random = np.random.RandomState(seed)
    documents = [random.randint(1, 30, size=random.randint(0, most_sentences)).tolist() for _ in range(count)]
    documents[3] = [5, 513, 7]
    documents[5] = [600]
    documents[7] = random.randint(1, 9, size=120).tolist()
    return documents

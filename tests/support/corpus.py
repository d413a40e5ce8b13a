"""A tiny data set of token documents, and the flags of a tiny run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedWriter
from tests.support.device import backend_of_tests

VOCAB_SIZE = 64
"""As ``--vocab-size`` of the null tokenizer, which adds an end-of-document token."""


def write_documents(prefix: Path, documents: int = 40, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes learnable documents (each token says the next but for a little noise) and returns the prefix."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype=np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            length = int(random.integers(30, 120))
            steps = random.integers(1, 4, length)
            tokens = np.cumsum(steps) * 3 % vocab_size
            writer.add_document(np.append(tokens, vocab_size))
    return prefix


def tiny_flags(prefix: Path, **changes: object) -> list[str]:
    """Flags of a run that takes milliseconds an iteration.

    A change of None removes a flag, True gives a switch, and a list repeats the flag. On a GPU, layers are compiled
    only where a test asks for it, as every rank would spend its time on that.
    """
    values: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iters": 6,
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "make_vocab_size_divisible_by": 1,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCAB_SIZE,
        "data_path": prefix,
        "split": "80,10,10",
        "distributed_backend": backend_of_tests(),
        "log_interval": 1,
        "eval_iters": 1,
        "eval_interval": 1000,
        "compile": "off" if backend_of_tests() == "nccl" else None,
    }
    values.update(changes)
    flags = []
    for name, value in values.items():
        for word in value if isinstance(value, list) else ():
            flags += [f"--{name.replace('_', '-')}", str(word)]
        if value is not None and not isinstance(value, list):
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else str(value).split())
    return flags


def write_sentences(prefix: Path, documents: int = 40, seed: int = 0) -> tuple[Path, Path]:
    """Writes documents of some sentences and a WordPiece vocabulary; returns the prefix and the vocabulary's file."""
    vocab = prefix.with_name("vocab.txt")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(40)] + [f"##p{number}" for number in range(10)]
    vocab.write_text("\n".join([*special, *words]) + "\n")
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype=np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            lengths = random.integers(2, 9, int(random.integers(2, 12))).tolist()
            steps = np.cumsum(random.integers(1, 4, sum(lengths)))
            writer.add_document(len(special) + steps % len(words), lengths)
    return prefix, vocab


def tiny_t5_flags(data: tuple[Path, Path], **changes: object) -> list[str]:
    """Flags of a run of ``pretrain_t5.py`` on data from ``write_sentences``, otherwise as ``tiny_bert_flags``."""
    words: dict[str, Any] = {"vocab_extra_ids": 6, "mask_prob": 0.3, "decoder_seq_length": 12}
    return tiny_bert_flags(data, **{**words, **changes})


def tiny_bert_flags(data: tuple[Path, Path], **changes: object) -> list[str]:
    """Flags of a run of ``pretrain_bert.py`` on data from ``write_sentences``, otherwise as ``tiny_flags``."""
    prefix, vocab = data
    words: dict[str, Any] = {"tokenizer_type": "BertWordPieceCase", "vocab_size": None, "vocab_file": vocab}
    return tiny_flags(prefix, **{**words, "seq_length": 24, "max_position_embeddings": 24, **changes})

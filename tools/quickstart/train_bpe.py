"""Trains a byte-level BPE vocabulary and writes it as GPT-2's two files, vocab.json and merges.txt.

python tools/quickstart/train_bpe.py --input train.jsonl --output-dir DIR [--vocab-size 4096]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.config.errors import UserError
from megatron.data.atomic import atomic_write

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_FILES = ("vocab.json", "merges.txt")


def texts(path: Path, key: str = "text") -> Iterator[str]:
    """The texts of a JSON-lines file.

    Raises:
        UserError: for a line that is no such record.
    """
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield json.loads(line)[key]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}:{number}: not a JSON object with the key {key!r}") from None


def train(corpus: Path, folder: Path, vocab_size: int) -> int:
    """Trains on a corpus and writes the two files; the same corpus gives the same bytes.

    Returns:
        The number of entries, ``<|endoftext|>`` included: fewer than asked for if pairs run out.

    Raises:
        UserError: for a broken corpus or a vocabulary that cannot hold all bytes.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise UserError(f"--vocab-size {vocab_size} must exceed the {len(alphabet)} byte values")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        tokenizer.model.save(temporary)
        for name in VOCABULARY_FILES:
            with atomic_write(folder / name) as stream:
                stream.write((Path(temporary) / name).read_bytes())
    return int(tokenizer.get_vocab_size())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    args = parser.parse_args()
    try:
        size = train(args.input, args.output_dir, args.vocab_size)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output_dir}: {size:,} entries in {' and '.join(VOCABULARY_FILES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

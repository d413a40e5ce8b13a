"""Trains a byte-level BPE vocabulary on text, and writes it as GPT-2's two files, vocab.json and merges.txt.

    python tools/train_vocab.py --input corpus.jsonl --vocab-size 32000 --output-dir vocabulary
    python tools/train_vocab.py --input 'shards/*.jsonl.gz' --documents 1000000 --output-dir vocabulary

The input is JSON lines with a document each, as for tools/preprocess_data.py. Pass the files to it, and to training,
with --tokenizer-type GPT2BPETokenizer --vocab-file vocabulary/vocab.json --merge-file vocabulary/merges.txt. The same
text gives the same files. Memory and time grow with the number of distinct words; for any corpus, a few gigabytes of
text, sampled evenly, are enough.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.base.atomic import atomic_write, check_writable
from megatron.base.errors import UserError
from megatron.base.user_text import flag_of
from megatron.data.interrupt import run_command
from megatron.data.preprocess.command import PreprocessParser
from megatron.data.preprocess.encoding import parse_line
from megatron.data.preprocess.pipeline import Totals
from megatron.data.preprocess.progress import EncodingProgress
from megatron.data.preprocess.reading import divide, expand_inputs, read_blocks
from megatron.tokenizer.gpt2 import END_OF_TEXT

VOCABULARY_FILES = ("vocab.json", "merges.txt")
MAX_ENTRIES = 10_000_000

Watch = Callable[[Totals, list[str]], None]


def read_texts(
    files: Sequence[str], keys: Sequence[str], documents: int | None = None, watch: Watch = lambda *_: None
) -> Iterator[str]:
    """Read the texts of JSON-lines files.

    Args:
        files: paths of the files.
        keys: keys of the texts.
        documents: maximum number of documents; None for all.
        watch: called after each block with the running totals.

    Raises:
        UserError: when a line is not a valid record, or a file cannot be read.
    """
    totals = Totals()
    is_empty = True
    for block in read_blocks(divide(list(files), 1)[0]):
        for index, line in enumerate(block.lines, start=block.first):
            if totals.documents == documents:
                break
            totals.size += len(line)
            try:
                line_texts = parse_line(line, keys, first=not index)
            except ValueError as error:
                location = f"{block.source.label}:{block.source.line_number(index)}"
                raise UserError(f"{location}: {error}. Correct or remove the line") from None
            if line_texts is not None:
                totals.documents += 1
                is_empty = is_empty and not any(line_texts)
                yield from line_texts
        watch(totals, [])
        if totals.documents == documents:
            break
    if is_empty:
        raise UserError(f"--input {files[0]}: there is no text to train on")


def train(
    files: Sequence[str | Path],
    folder: Path,
    vocab_size: int,
    *,
    keys: Sequence[str] = ("text",),
    documents: int | None = None,
    min_frequency: int = 2,
    watch: Watch = lambda *_: None,
    on_merge: Callable[[], None] = lambda: None,
    bars: bool = False,
) -> int:
    """Train a vocabulary and write its two files; the same text gives the same bytes.

    Args:
        files: JSON-lines files or glob patterns.
        folder: output folder; created if missing.
        vocab_size: number of entries, ``<|endoftext|>`` included.
        keys: keys of the texts.
        documents: maximum number of documents; None for all.
        min_frequency: minimum occurrences of a pair to be merged.
        watch: called with the running totals.
        on_merge: called after all text is read, before pairs are merged.
        bars: show the progress bars of ``tokenizers`` for reading, counting and merging.

    Returns:
        Number of entries; fewer than ``vocab_size`` if pairs run out.

    Raises:
        UserError: when the text is broken, the vocabulary cannot hold all bytes, or a file cannot be written.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not len(alphabet) < vocab_size <= MAX_ENTRIES:
        raise UserError(
            f"--vocab-size {vocab_size} must exceed the {len(alphabet)} byte values, and be at most {MAX_ENTRIES:,}"
        )
    names = expand_inputs([str(path) for path in files])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: {error.strerror}; name a folder that can be written") from error
    for name in VOCABULARY_FILES:
        check_writable(folder / name, "--output-dir")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=bars,
    )
    tokenizer.train_from_iterator(_call_after(read_texts(names, keys, documents, watch), on_merge), trainer)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            tokenizer.model.save(temporary)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"--output-dir {folder}: {error}; free some space, or name another folder") from error
        for name in VOCABULARY_FILES:
            with atomic_write(folder / name) as stream:
                stream.write((Path(temporary) / name).read_bytes())
    return int(tokenizer.get_vocab_size())


def _call_after(iterator: Iterator[str], done: Callable[[], None]) -> Iterator[str]:
    yield from iterator
    done()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    argument_parser = PreprocessParser(
        prog="train_vocab.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    argument_parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON-lines files or glob patterns; .gz, .bz2, .xz and .zst are decompressed; - is standard input",
    )
    argument_parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="folder for vocab.json and merges.txt"
    )
    argument_parser.add_argument(
        "--vocab-size", type=int, default=50257, metavar="N", help="entries (default: GPT-2's 50257)"
    )
    argument_parser.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the texts (default: text)",
    )
    argument_parser.add_argument(
        "--documents", type=int, metavar="N", help="number of documents to read (default: all)"
    )
    argument_parser.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="minimum occurrences of a merged pair (default: 2)"
    )
    argument_parser.add_argument(
        "--log-interval", type=int, default=10_000, metavar="N",
        help="documents between progress lines, without a terminal (default: 10000)",
    )  # fmt: skip
    return argument_parser


def run(options: argparse.Namespace) -> str:
    """Train according to the command line.

    Returns:
        A line that summarizes the result.

    Raises:
        UserError: when the input is invalid.
    """
    for name in ("documents", "min_frequency", "log_interval"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < 2**63:
            raise UserError(f"{flag_of(name)} {value}: give at least 1, and less than 2**63")
    bars = sys.stderr.isatty()
    progress = EncodingProgress(options.log_interval) if not bars else None  # tokenizers draws its bars on a terminal
    read = Totals()

    def watch(totals: Totals, bad: list[str]) -> None:
        nonlocal read
        read = totals
        if progress is not None:
            progress(totals, bad)

    def on_merge() -> None:
        if progress is not None:
            print(f"read {read.documents:,} documents; counting and merging pairs", file=sys.stderr, flush=True)

    size = train(
        options.input,
        options.output_dir,
        options.vocab_size,
        keys=options.json_keys,
        documents=options.documents,
        min_frequency=options.min_frequency,
        watch=watch,
        on_merge=on_merge,
        bars=bars,
    )
    summary = f"{options.output_dir}: {size:,} entries in {' and '.join(VOCABULARY_FILES)}"
    if size < options.vocab_size:
        summary += f", since no other pair occurs {options.min_frequency} times; more text gives more entries"
    return f"{summary} (read {read.documents:,} documents, {read.size / 1e6:,.1f} MB)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, or print a single-line error and return 2."""
    return run_command(lambda: print(run(parser().parse_args(arguments))))

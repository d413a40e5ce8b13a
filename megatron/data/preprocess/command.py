"""Command line of preprocessing: converts text to the ``.bin/.idx`` files that training reads."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.base.errors import UserError
from megatron.base.user_text import flag_of, nearest
from megatron.config.tokenizer import TOKENIZER_TYPES, TokenizerConfig
from megatron.data.interrupt import run_command
from megatron.data.preprocess.encoding import EncodeOptions
from megatron.data.preprocess.pipeline import EncodingJob, Totals, run, run_partitions
from megatron.data.preprocess.progress import EncodingProgress
from megatron.data.preprocess.reading import STDIN, divide, expand_inputs
from megatron.data.preprocess.sentences import load_punkt

_ABOUT = """\
Turn text into the .bin/.idx files that training reads.

The input is JSON lines: one object in each line, one document in each object. For every key of --json-keys
the tool writes PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with --split-sentences). Pass that
prefix, without .bin or .idx, to training as --data-path.
"""

_EXAMPLES = """\
examples:
  GPT-2 tokens, one file, an end-of-document token after each document:
    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
  many compressed files and 16 processes:
    python tools/preprocess_data.py --input 'shards/*.jsonl.gz' --workers 16 --output-prefix data/web ...
  from a pipe, leaving bad lines out:
    zstdcat corpus.jsonl.zst | python tools/preprocess_data.py --input - --on-error skip --output-prefix
    data/c ...
  sentences of two keys, for BERT:
    python tools/preprocess_data.py --input wiki.jsonl --json-keys title text --split-sentences \\
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --output-prefix data/wiki

The files appear under their names only when the run has succeeded. A run that fails or is killed leaves
earlier files unchanged (and may leave a *.partial file, which the next run overwrites).
"""


class PreprocessParser(argparse.ArgumentParser):
    """Argument parser that raises ``UserError`` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = PreprocessParser(
        prog="preprocess_data.py",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = parser.add_argument_group("input")
    text.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON-lines files or glob patterns; .gz, .bz2, .xz and .zst are decompressed; - is standard input",
    )
    text.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys whose strings are tokenized, each into its own files (default: text)",
    )
    text.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="treatment of bad lines (broken JSON, a missing key, a value that is not a string, invalid UTF-8), which "
        "are reported with file and line number (default: stop, with nothing written)",
    )
    text.add_argument(
        "--split-sentences",
        action="store_true",
        help="store each sentence as a sequence, split by nltk's Punkt if its model is on this machine "
        "(in the folder NLTK_DATA), else by rules; nothing is downloaded",
    )
    text.add_argument(
        "--keep-newlines",
        action="store_true",
        help="keep the white space between two sentences, at the end of the first",
    )
    text.add_argument("--lang", default="english", help="language of the Punkt model (default: english)")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}")
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="GPT-2's vocab.json, or BERT's vocab.txt")
    group.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="SentencePiece model, or folder of a Hugging Face tokenizer"
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="ids of the NullTokenizer")
    group.add_argument(
        "--vocab-extra-ids",
        type=int,
        default=0,
        metavar="N",
        help="sentinel ids after the vocabulary (default: 0)",
    )
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end each document that has tokens with the end-of-document token",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="start of the output files' names")
    output.add_argument(
        "--dataset-impl",
        choices=("mmap", "lazy", "cached"),
        default="mmap",
        help="file format: mmap, or the legacy format that lazy and cached share (default: mmap)",
    )
    speed = parser.add_argument_group("speed")
    speed.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    speed.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="parts of the input read at once, sharing the workers; the output is the same (default: 1)",
    )
    speed.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="documents between progress lines (default: 1000)",
    )
    return parser


def hyphenate_flags(words: Sequence[str]) -> list[str]:
    """Write the names of flags with hyphens in place of underscores."""
    parts = [word.partition("=") for word in words]
    return [
        (name.replace("_", "-") if name.startswith("--") else name) + equals + value for name, equals, value in parts
    ]


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Read the command line; underscores in flag names are read as hyphens.

    Raises:
        UserError: when a flag is unknown (the message suggests the closest match), or values are missing or
            contradictory.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(hyphenate_flags(argv))
    if unknown:
        names = [name for action in parser._actions for name in action.option_strings]
        hint = nearest(unknown[0], names) or "; see --help"
        raise UserError(f"{unknown[0]} is not a flag of preprocess_data.py{hint}")
    for name in ("workers", "partitions", "log_interval"):
        if getattr(args, name) < 1:
            raise UserError(f"{flag_of(name)} {getattr(args, name)} must be at least 1")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise UserError(f"--json-keys {' '.join(args.json_keys)}: give each key once")
    for key in args.json_keys:
        if "/" in key:
            raise UserError(f"--json-keys {key}: a key with / cannot be part of a file name")
    if args.keep_newlines and not args.split_sentences:
        raise UserError("--keep-newlines needs --split-sentences: without it, the text is unchanged")
    return args


def preprocess(args: argparse.Namespace) -> Totals:
    """Preprocess the input according to the parsed flags.

    Raises:
        UserError: when the input is invalid, or a file cannot be read or written.
    """
    files = expand_inputs(args.input)
    tokenizer = TokenizerConfig(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(TokenizerConfig)}
    )
    options = EncodeOptions(
        tuple(args.json_keys), tokenizer, args.append_eod, args.split_sentences, args.keep_newlines, args.lang
    )
    if args.split_sentences and load_punkt(args.lang) is None:
        print(
            f"note: there is no Punkt model for {args.lang} on this machine, so sentences are split by rules. "
            f"To use nltk's model, set NLTK_DATA to the folder that holds tokenizers/punkt_tab/{args.lang}",
            file=sys.stderr,
        )
    level = "sentence" if options.split_sentences else "document"
    prefixes = [f"{args.output_prefix}_{key}_{level}" for key in options.json_keys]
    job = EncodingJob(options, args.dataset_impl, args.on_error == "skip", args.workers)
    partitions = divide(files, args.partitions)
    if STDIN in files and args.partitions > 1:
        print("note: standard input is read as one part", file=sys.stderr)
    progress = EncodingProgress(args.log_interval)
    try:
        if len(partitions) > 1:
            totals = run_partitions(job, partitions, prefixes, progress)
        else:
            totals = run(job, partitions[0], prefixes, progress)
    finally:
        progress.close()
    docs_per_s, mb_per_s = progress.rates(totals)
    skipped = f", {totals.skipped} bad lines skipped" if totals.skipped else ""
    print(
        f"{totals.documents} documents, {totals.sequences} sequences, {totals.tokens} tokens{skipped} "
        f"({docs_per_s:.1f} docs/s, {mb_per_s:.2f} MB/s)",
        file=sys.stderr,
    )
    for prefix in prefixes:
        print(f"{prefix}.bin, {prefix}.idx", file=sys.stderr)
    return totals


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 on success, or print a single-line error and return 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: preprocess(parse_flags(words)))

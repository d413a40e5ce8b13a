"""Command line that joins indexed data sets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron.base.errors import UserError
from megatron.data.idx_format import read_index
from megatron.data.indexed import IndexedWriter, dataset_files
from megatron.data.interrupt import run_command
from megatron.data.preprocess.command import PreprocessParser, hyphenate_flags

_ABOUT = """\
Join .bin/.idx pairs into one, in the order of their names or of --prefixes.

  python tools/merge_datasets.py --input parts --output-prefix data/all
  python tools/merge_datasets.py --prefixes a_text_document b_text_document --output-prefix data/all

All pairs must have the same token type and format, which the result keeps. The result appears under its name only
when it is complete. Tokens are copied file by file, so memory does not limit the size.
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = PreprocessParser(
        prog="merge_datasets.py",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        metavar="FOLDER",
        help="folder whose .bin/.idx pairs are joined, sorted by name, without an earlier output",
    )
    source.add_argument("--prefixes", nargs="+", metavar="PREFIX", help="pairs to join, without .bin/.idx, in order")
    parser.add_argument("--output-prefix", metavar="PREFIX", help="name of the result, without .bin/.idx (required)")
    parser.add_argument("--multimodal", action="store_true", help=argparse.SUPPRESS)
    return parser


def find_prefixes(folder: str, output_prefix: str) -> list[str]:
    """Find the pairs of a folder, sorted by name, without the output of an earlier run.

    Raises:
        UserError: when there is no pair, a file of a pair is missing, or the output would replace an input.
    """
    try:
        names = sorted(path.name for path in Path(folder).iterdir() if path.suffix in (".bin", ".idx"))
    except OSError as error:
        raise UserError(f"--input {folder}: {error.strerror}; name a folder of .bin/.idx pairs") from None
    stems = {name.rpartition(".")[0] for name in names}
    for stem in sorted(stems):
        missing_names = [name for name in (f"{stem}.bin", f"{stem}.idx") if name not in names]
        if missing_names:
            raise UserError(
                f"--input {folder}: {stem} has no {missing_names[0]}; copy it there, or remove the other file"
            )
    paths = [str(Path(folder) / stem) for stem in sorted(stems)]
    prefixes = [prefix for prefix in paths if not _are_same(prefix, output_prefix)]
    if not prefixes:
        raise UserError(f"--input {folder}: holds no .bin/.idx pair to join")
    if len(prefixes) < len(stems):
        lengths = [read_index(dataset_files(prefix)[1]).lengths for prefix in (*prefixes, output_prefix)]
        if not np.array_equal(np.concatenate(lengths[:-1]), lengths[-1]):
            raise UserError(
                f"--output-prefix {output_prefix}: is a data set in --input {folder}, but not the others joined; name "
                "another, or remove it"
            )
    return prefixes


def _are_same(prefix: str, other_prefix: str) -> bool:
    """Whether two prefixes name the same files."""
    return dataset_files(prefix)[0].resolve() == dataset_files(other_prefix)[0].resolve()


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedWriter:
    """Merge data sets; return the finished writer.

    Raises:
        UserError: when they cannot be merged, or the result would overwrite an input.
    """
    for prefix in prefixes:
        if _are_same(prefix, output_prefix):
            raise UserError(f"--output-prefix {output_prefix}: is one of the data sets to join; name another")
    first = None
    for prefix in prefixes:
        path = dataset_files(prefix)[1]
        table = read_index(path)
        first = first or table
        if table.dtype != first.dtype:
            raise UserError(
                f"{path}: holds {table.dtype.name} tokens and cannot join the {first.dtype.name} ones of "
                f"{prefixes[0]}; preprocess one of them again with the other's tokenizer"
            )
        if table.legacy != first.legacy:
            kinds = {True: "the legacy lazy/cached", False: "the mmap"}
            raise UserError(
                f"{path}: is in {kinds[table.legacy]} format and cannot join {prefixes[0]} in {kinds[first.legacy]} "
                "format; preprocess one of them again with the other's --dataset-impl"
            )
    assert first is not None
    with IndexedWriter.like(first, output_prefix) as writer:
        for prefix in tqdm(prefixes, unit="data set", disable=not sys.stderr.isatty()):
            writer.merge(prefix)
    return writer


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 on success, or print a single-line error and return 2."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(build_parser().parse_args(hyphenate_flags(words))))


def _run(args: argparse.Namespace) -> None:
    if args.multimodal:
        raise UserError("--multimodal: data sets with sequence modes are not supported; leave the flag out")
    missing_flags = [] if args.input or args.prefixes else ["--input or --prefixes"]
    missing_flags += [] if args.output_prefix is not None else ["--output-prefix"]
    if missing_flags:
        raise UserError(f"not given but required: {', '.join(missing_flags)}; see --help")
    if os.path.basename(args.output_prefix) in ("", ".", ".."):
        raise UserError(f"--output-prefix {args.output_prefix}: names no file; give a name such as data/all")
    prefixes = args.prefixes or find_prefixes(args.input, args.output_prefix)
    writer = merge(prefixes, args.output_prefix)
    print(
        f"{args.output_prefix}: {len(prefixes)} data sets, {writer.num_documents:,} documents, "
        f"{writer.num_sequences:,} sequences",
        file=sys.stderr,
    )

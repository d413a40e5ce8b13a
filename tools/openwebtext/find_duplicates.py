#!/usr/bin/env python
"""Finds near-duplicate documents.

    python tools/openwebtext/find_duplicates.py --inputs a.jsonl url b.jsonl.gz url --output duplicates.jsonl

Each input is a file of JSON lines and the field that names its documents; of documents with the same name, only the
first is compared. Writes {"URL": [{"OTHER": similarity}, ...]} for documents whose similarity (Jaccard, of their
five-character shingles) is above 0.5. Candidates are documents whose MinHash fingerprints agree in all rows of a band
(--num-seeds / --num-bands rows); their similarity is computed from the texts. With 100 seeds in 10 bands, pairs of
similarity 0.5, 0.7, 0.8 and 0.9 meet in a band with probability 0.01, 0.25, 0.68 and 0.99; more bands find more.

--save-fingerprints saves the fingerprints, so that a later run can compare new documents with old documents without
their texts; those similarities are estimated from the fingerprints (with 100 seeds to about 0.05).
Memory: 4 bytes per seed and about 250 more for each document (650 with 100 seeds; twice that for a moment), 300 to 500
for each pair found, and in each process 16 for each document, the shingles of 1,000 texts (8 bytes for each character)
and about 30 bytes for each character of the longest text. Texts are kept in a nameless file in the folder of the
output. Pairs are in the order of the documents, those of --load-fingerprints first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.find_duplicates")

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.lines import writing
from megatron.data.processes import map_in_processes
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart, progress
from tools.openwebtext.cleaning.comparing import Comparison, merge_matches
from tools.openwebtext.cleaning.filtering import BAD_LINE, FilePart, apply_to_lines, encode, in_chunks, split_file
from tools.openwebtext.cleaning.fingerprints import Fingerprints, load_fingerprints, signatures

MAX_SEEDS = 10_000
_BUCKETS = 256
"""Buckets of a work item."""


def _fingerprints_of(
    seeds: int, seed: int, skip_bad: bool, part: FilePart
) -> tuple[list[list[str]], NDArray[np.uint32], NDArray[np.int64], int]:
    """Keys, texts, fingerprints and sizes of the documents of some lines, and the number of bad lines."""
    documents, num_bad = apply_to_lines(lambda row, line, where: [row[key] for key in part.keys], part, skip_bad)
    return documents, *signatures([text for _, text in documents], seeds, seed), num_bad


def check(options: argparse.Namespace) -> None:
    """Check the flags.

    Raises:
        UserError: when a flag is invalid.
    """
    if len(options.inputs) % 2:
        raise UserError("--inputs: give a file and the field that names its documents, then the next file and field")
    if not 1 <= options.num_seeds <= MAX_SEEDS:
        raise UserError(f"--num-seeds {options.num_seeds}: give 1 to {MAX_SEEDS}")
    if not 0 <= options.seed < 1 << 64:
        raise UserError(f"--seed {options.seed}: give 0 to {(1 << 64) - 1}")
    if options.num_bands < 1 or options.num_seeds % options.num_bands:
        raise UserError(f"--num-bands {options.num_bands} does not divide --num-seeds {options.num_seeds}")
    if options.heuristic_iter < -1 or options.heuristic_iter == 0:
        raise UserError(f"--heuristic-iter {options.heuristic_iter}: give at least 1, or -1 for all")
    if not options.inputs and not options.load_fingerprints:
        raise UserError("--inputs is missing")
    if not options.output and not options.save_fingerprints:
        raise UserError("--output is missing (or --save-fingerprints)")
    outputs = [options.output, options.save_fingerprints, options.report]
    check_apart([*options.inputs[::2], options.load_fingerprints], outputs)


@contextmanager
def _scratch_file(folder: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open a nameless file, which disappears with this process; yield it and a path for other processes.

    Raises:
        UserError: if the disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            yield stream, f"/proc/{os.getpid()}/fd/{stream.fileno()}"
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from error


def run(options: argparse.Namespace) -> Report:
    """Find the duplicates of some files."""
    report = Report()
    folder = Path(options.output or options.save_fingerprints).resolve().parent
    with _scratch_file(folder) as (texts, texts_path), _scratch_file(folder) as (rows_file, rows_path):
        keys: list[str] = []
        rows, sizes = [np.empty((0, options.num_seeds), np.uint32)], [np.empty(0, np.int64)]
        if options.load_fingerprints:
            loaded, keys = load_fingerprints(Path(options.load_fingerprints), options.num_seeds, options.seed)
            rows, sizes = [loaded.rows], [loaded.sizes]
        num_loaded = len(keys)
        lengths = [0] * num_loaded
        inputs = zip(options.inputs[::2], options.inputs[1::2], strict=True)
        parts = (part for path, name in inputs for part in split_file(path, name, options.key))
        fingerprinting = partial(_fingerprints_of, options.num_seeds, options.seed, options.skip_bad_lines)
        with progress((), "fingerprints") as bar:
            for documents, part_rows, part_sizes, num_bad in map_in_processes(fingerprinting, parts, options.workers):
                if num_bad:
                    report[BAD_LINE] += num_bad
                rows.append(part_rows)
                sizes.append(part_sizes)
                for key, text in documents:
                    keys.append(key)
                    lengths.append(texts.write(text.encode("utf-8", "surrogatepass")))
                bar.update(len(documents))
        if not keys:
            raise UserError("the inputs contain no document")
        texts.flush()
        fingerprints = Fingerprints(np.concatenate(rows), np.concatenate(sizes))
        del rows, sizes
        report["documents"] += len(keys)
        report["bytes of fingerprints a document"] += 4 * options.num_seeds + 8
        if options.save_fingerprints:
            fingerprints.save(Path(options.save_fingerprints), keys, options.seed)
        if options.output:
            np.save(rows_file, fingerprints.rows)
            rows_file.flush()
            bounds = np.cumsum([0, *lengths])
            compare = Comparison(
                texts_path, bounds, num_loaded, rows_path, fingerprints.sizes,
                options.jaccard, options.heuristic_iter, options.seed,
            )  # fmt: skip
            _write_duplicates(options, keys, fingerprints, compare, report)
    return report


def _write_duplicates(
    options: argparse.Namespace, keys: list[str], fingerprints: Fingerprints, compare: Comparison, report: Report
) -> None:
    first_documents = {key: number for number, key in reversed(list(enumerate(keys)))}
    documents = np.sort(np.fromiter(first_documents.values(), np.int64))
    del first_documents
    if num_repeated := len(keys) - len(documents):
        report["repeated names, of which the first counts"] += num_repeated
        example = keys[int(np.setdiff1d(np.arange(len(keys)), documents)[0])]
        print(
            f"find_duplicates: warning: {num_repeated:,} documents are not compared: earlier ones have their names "
            f"(first {example!r}); give each document a unique name (add_id.py does)",
            file=sys.stderr,
        )
    buckets = progress(fingerprints.buckets(options.num_bands, documents), "buckets", "bucket")
    workers = options.workers if options.jaccard_parallel else 1
    report["pairs"] = 0
    with writing(options.output) as write:
        for first, others in merge_matches(map_in_processes(compare, in_chunks(buckets, _BUCKETS), workers)).items():
            write(encode({keys[first]: [{keys[other]: round(value, 6)} for other, value in others.items()]}))
            report["pairs"] += len(others)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", nargs="*", default=[], metavar="X", help="FILE FIELD FILE FIELD ...")
    parser.add_argument("--key", default="text", help="field that holds the text (text)")
    parser.add_argument("--output", metavar="FILE", help="file for the duplicates")
    parser.add_argument("--load-fingerprints", metavar="FILE", help="also compare with these documents")
    parser.add_argument("--save-fingerprints", metavar="FILE", help="write the fingerprints of all documents")
    parser.add_argument(
        "--jaccard", choices=("union", "min", "max"), default="union", help="divisor of the intersection (union)"
    )
    parser.add_argument(
        "--heuristic-iter", type=int, default=1, metavar="N",
        help="documents of each bucket to compare with the others; -1: all that remain (1)",
    )  # fmt: skip
    parser.add_argument("--num-bands", type=int, default=10, metavar="N", help="bands of a fingerprint (10)")
    parser.add_argument("--num-seeds", type=int, default=100, metavar="N", help="hash functions (100)")
    parser.add_argument("--jaccard-parallel", action="store_true", help="compare in several processes")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the hash functions (1234)")
    add_common(parser)


main = Tool("find_duplicates.py", __doc__, add_flags, run, check)

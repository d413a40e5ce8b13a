#!/usr/bin/env python
"""Finds documents that are nearly the same.

    python tools/openwebtext/find_duplicates.py --inputs a.jsonl url b.jsonl.gz url --output duplicates.jsonl

Each input is a file of JSON lines and the field that names its documents; of documents with one name, only the first
is compared. Writes {"URL": [{"OTHER": similarity}, ...]} for documents whose similarity (Jaccard, of their runs of five
characters) is above 0.5. Candidates are the documents whose MinHash fingerprints agree in all rows of a band
(--num-seeds / --num-bands rows); their similarity is computed from the texts. With 100 seeds in 10 bands, pairs of
similarity 0.5, 0.7, 0.8 and 0.9 meet in a band with probability 0.01, 0.25, 0.68 and 0.99; more bands find more.

--save-fingerprints keeps the fingerprints, so that a later run compares new documents with old ones without their
texts; similarities to those are estimated from the fingerprints (with 100 seeds to about 0.05).
Memory: 4 bytes a seed and about 150 more for each document (550 with 100 seeds), 300 to 500 for each pair found, and in
each process 32 for each document, up to 100 MB and about 30 bytes for each character of the longest text; besides, what
--load-fingerprints reads is there twice for a moment, and --save-fingerprints holds the documents' names. Texts wait in
a file without a name in the folder of the output; processes share it, and the fingerprints. Pairs come in the order of
the documents, those of --load-fingerprints first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.find_duplicates")

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.cleaning.command import Report, Tool, add_common, check_apart, progress
from megatron.data.cleaning.comparing import Comparison, Texts, merged
from megatron.data.cleaning.filtering import BAD_LINE, FilePart, encode, in_chunks, of_each, parts_of
from megatron.data.cleaning.fingerprints import Index, signatures
from megatron.data.lines import writing
from megatron.data.processes import in_processes

MOST_SEEDS = 10_000
_BUCKETS = 256
"""Buckets that a process is given at a time."""


@dataclass(frozen=True)
class _Fingerprint:
    """What is read of some lines, of which two fields must be text, the name and the text of a document.

    It gives these two, fingerprints and sizes, and the number of lines that are no documents.
    """

    seeds: int
    seed: int
    skip_bad: bool

    def __call__(self, part: FilePart) -> tuple[list[list[str]], NDArray[np.uint32], NDArray[np.int64], int]:
        found, bad = of_each(lambda row, line, where: [row[key] for key in part.keys], part, self.skip_bad)
        return found, *signatures([text for _, text in found], self.seeds, self.seed), bad


class Corpus:
    """Documents whose fingerprints are in memory and whose keys and texts are in a file.

    Args:
        spill: a temporary file.
        seeds: numbers of a fingerprint.
    """

    def __init__(self, spill: BinaryIO, seeds: int) -> None:
        self.spill = spill
        self._seeds = seeds
        # Arrays that grow where they are: parts that are put together at the end would be there twice.
        self._places, self._sizes, self._rows = array("q"), array("q"), array("I")
        self._end = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def take(self, rows: NDArray[np.uint32], sizes: NDArray[np.int64]) -> None:
        """Takes the fingerprints and the sizes of the next documents."""
        self._rows.frombytes(rows.reshape(-1).view(np.uint8).data)
        self._sizes.frombytes(sizes.view(np.uint8).data)

    def add(self, key: str, text: str | None) -> None:
        """Puts a document into the file; None stands for a text that is not there."""
        packed = [key.encode("utf-8", "surrogatepass"), (text or "").encode("utf-8", "surrogatepass")]
        self.spill.write(b"".join(packed))
        self._places.extend((self._end, len(packed[0]), -1 if text is None else len(packed[1])))
        self._end += sum(map(len, packed))

    def index(self, seed: int) -> tuple[Index, NDArray[np.int64]]:
        """All fingerprints, and where the documents are: the offset and the lengths of key and text (-1: none)."""
        self.spill.flush()
        rows = np.frombuffer(self._rows, dtype=np.uint32).reshape(-1, self._seeds)
        index = Index(rows, np.frombuffer(self._sizes, dtype=np.int64), seed)
        return index, np.frombuffer(self._places, dtype=np.int64).reshape(-1, 3)


def read_all(options: argparse.Namespace, corpus: Corpus, report: Report) -> None:
    """Fingerprints all inputs.

    Raises:
        UserError: naming the file and the line that is no document.
    """

    inputs = zip(options.inputs[::2], options.inputs[1::2], strict=True)
    parts = (part for path, name in inputs for part in parts_of(path, name, options.key))
    work = _Fingerprint(options.num_seeds, options.seed, options.skip_bad_lines)
    with progress((), "fingerprints") as bar:
        for found, rows, sizes, bad in in_processes(work, parts, options.workers):
            if bad:
                report.add(BAD_LINE, bad)
            corpus.take(rows, sizes)
            for key, text in found:
                corpus.add(key, text)
            bar.update(len(found))


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _repeated(texts: Texts, count: int) -> NDArray[np.bool_]:
    """Documents whose key an earlier one has."""
    hashes = np.fromiter((_digest(texts.key(number)) for number in range(count)), np.uint64, count)
    repeated = np.ones(count, dtype=bool)
    repeated[np.unique(hashes, return_index=True)[1]] = False
    return repeated


def check(options: argparse.Namespace) -> None:
    """Checks the flags.

    Raises:
        UserError: when they make no sense.
    """
    if len(options.inputs) % 2:
        raise UserError("--inputs: give a file and the field that names its documents, then the next file and field")
    if not 1 <= options.num_seeds <= MOST_SEEDS:
        raise UserError(f"--num-seeds {options.num_seeds}: give 1 to {MOST_SEEDS}")
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
def _scratch(folder: Path) -> Iterator[tuple[BinaryIO, str]]:
    """A file that goes with this process, however that ends, and where other processes find it meanwhile.

    Raises:
        UserError: when the disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            yield stream, f"/proc/{os.getpid()}/fd/{stream.fileno()}"  # it has no name in the folder
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from error


def run(options: argparse.Namespace) -> Report:
    """Finds the duplicates of some files.

    Raises:
        UserError: for files that cannot be read or written.
    """
    report = Report()
    folder = Path(options.output or options.save_fingerprints).resolve().parent
    with _scratch(folder) as (spill, spilled), _scratch(folder) as (prints, printed):
        corpus = Corpus(spill, options.num_seeds)
        if options.load_fingerprints:
            old, keys = Index.load(Path(options.load_fingerprints), options.num_seeds, options.seed)
            corpus.take(old.rows, old.sizes)
            for key in keys:
                corpus.add(key, None)
            del old, keys
        read_all(options, corpus, report)
        if not len(corpus):
            raise UserError("the inputs hold no document")
        index, places = corpus.index(options.seed)
        report.add("documents", len(places))
        report.add("bytes of fingerprints a document", index.bytes_per_document)
        texts = Texts(spilled, places)
        if options.save_fingerprints:
            index.save(Path(options.save_fingerprints), [texts.key(number) for number in range(len(places))])
        if options.output:
            np.save(prints, index.rows)
            prints.flush()
            of_run = (options.jaccard, options.heuristic_iter, options.seed)
            compare = Comparison(spilled, places, printed, index.sizes, *of_run)
            _write_duplicates(options, texts, index, compare, report)
        texts.stream.close()
    return report


def _write_duplicates(
    options: argparse.Namespace, texts: Texts, index: Index, compare: Comparison, report: Report
) -> None:
    # Not of compare.index, which would go to every process with all its rows.
    left_out = _repeated(texts, len(texts.places))
    if left_out.any():
        report.add("repeated names, of which the first counts", int(left_out.sum()))
        example = texts.key(int(left_out.argmax()))
        print(
            f"find_duplicates: warning: {left_out.sum():,} documents are not compared, since an earlier one has their "
            f"name ({example!r} first); give each a name of its own (add_id.py does)",
            file=sys.stderr,
        )
    buckets = progress(index.buckets(options.num_bands, left_out), "buckets", "bucket")
    workers = options.workers if options.jaccard_parallel else 1
    results = in_processes(compare, in_chunks(buckets, _BUCKETS), workers)
    report.add("pairs", 0)
    with writing(options.output) as write:
        for first, others in merged(results).items():
            write(encode({texts.key(first): [{texts.key(other): round(value, 6)} for other, value in others]}))
            report.add("pairs", len(others))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", nargs="*", default=[], metavar="X", help="FILE FIELD FILE FIELD ...")
    parser.add_argument("--key", default="text", help="field that holds the text (text)")
    parser.add_argument("--output", metavar="FILE", help="for the duplicates")
    parser.add_argument("--load-fingerprints", metavar="FILE", help="compare with these documents, too")
    parser.add_argument("--save-fingerprints", metavar="FILE", help="write the fingerprints of all documents")
    parser.add_argument(
        "--jaccard", choices=("union", "min", "max"), default="union", help="what the shared part is divided by (union)"
    )
    parser.add_argument(
        "--heuristic-iter", type=int, default=1, metavar="N",
        help="documents of each bucket that are compared with the others; -1: all that are left (1)",
    )  # fmt: skip
    parser.add_argument("--num-bands", type=int, default=10, metavar="N", help="that a fingerprint is cut into (10)")
    parser.add_argument("--num-seeds", type=int, default=100, metavar="N", help="hash functions (100)")
    parser.add_argument("--jaccard-parallel", action="store_true", help="compare in several processes, too")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of the hash functions (1234)")
    add_common(parser)


main = Tool("find_duplicates.py", __doc__, add_flags, run, check)

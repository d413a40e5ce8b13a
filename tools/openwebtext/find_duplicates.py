#!/usr/bin/env python
"""Finds documents that are nearly the same.

    python tools/openwebtext/find_duplicates.py --inputs a.jsonl url b.jsonl.gz url --output duplicates.jsonl

Each input is a file of JSON lines and the field that names its documents. Writes {"URL": [{"OTHER": similarity}, ...]}
for documents whose similarity (Jaccard, of their runs of five characters) is above 0.5. Candidates are the documents
whose MinHash fingerprints agree in all rows of a band (--num-seeds / --num-bands rows); their similarity is computed
from the texts. With 100 seeds in 10 bands, pairs of similarity 0.5, 0.7, 0.8 and 0.9 meet in a band with
probability 0.01, 0.25, 0.68 and 0.99; more bands find more.

--save-fingerprints keeps the fingerprints, so that a later run compares new documents with old ones without their
texts; similarities to those are estimated from the fingerprints (with 100 seeds to about 0.05).
Memory: 4 bytes a seed and about 60 more for each document (460 with 100 seeds), and about 150 for each pair found;
texts wait in a temporary file. Pairs come in the order of the documents, those of --load-fingerprints first.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from megatron.config.errors import UserError
from tools.openwebtext.filtering import BAD_LINE
from tools.openwebtext.fingerprints import Hashes, Index, shingle_hashes, signatures, similarity
from tools.openwebtext.streams import (
    Report,
    add_common,
    command,
    document,
    encode,
    in_chunks,
    in_processes,
    lines,
    progress,
    text_of,
    writing,
)  # fmt: skip

LEAST = 0.5
_BUCKETS = 256
"""Buckets that a process is given at a time."""


@dataclass(frozen=True)
class _Lines:
    first: int
    path: str
    key: str
    text: str
    lines: Sequence[bytes]
    skip_bad: bool
    seeds: int
    seed: int


Read = tuple[list[tuple[str, str]], Any, Any, int]
"""Keys and texts, their fingerprints and sizes, and the lines that were no documents."""


def _fingerprint(part: _Lines) -> Read:
    found, bad = [], 0
    for number, line in enumerate(part.lines, part.first):
        where = f"{part.path}, line {number}"
        try:
            row = document(line, where)
            found.append((str(text_of(row, part.key, where)), text_of(row, part.text, where)))
        except UserError:
            if not part.skip_bad:
                raise
            bad += 1
    if not found:
        return [], None, None, bad
    rows, sizes = signatures([text for _, text in found], part.seeds, part.seed)
    return found, rows, sizes, bad


class Corpus:
    """Documents whose fingerprints are in memory and whose keys and texts are in a file.

    Args:
        spill: a temporary file.
    """

    def __init__(self, spill: BinaryIO) -> None:
        self.spill = spill
        self._places = array("q")
        self.rows: list[NDArray[np.uint32]] = []
        self.sizes: list[NDArray[np.int64]] = []
        self._end = 0

    def add(self, key: str, text: str | None) -> None:
        """Puts a document into the file; None stands for a text that is not there."""
        packed = [key.encode("utf-8", "surrogatepass"), (text or "").encode("utf-8", "surrogatepass")]
        self.spill.write(b"".join(packed))
        self._places.extend((self._end, len(packed[0]), -1 if text is None else len(packed[1])))
        self._end += sum(map(len, packed))

    def index(self, seed: int) -> tuple[Index, NDArray[np.int64]]:
        """All fingerprints, and where the documents are: the offset and the lengths of key and text (-1: none)."""
        self.spill.flush()
        index = Index(np.concatenate(self.rows), np.concatenate(self.sizes), seed)
        self.rows, self.sizes = [], []
        return index, np.frombuffer(self._places, dtype=np.int64).reshape(-1, 3)


class Texts:
    """Reads keys and texts from the file.

    Args:
        path: of it.
        places: where each document begins, and the lengths of its key and its text.
    """

    def __init__(self, path: str, places: NDArray[np.int64]) -> None:
        self.stream = open(path, "rb")  # noqa: SIM115  # for as long as the process works
        self.places = places
        self.shingles = lru_cache(maxsize=256)(self._shingles)

    def key(self, number: int) -> str:
        start, length, _ = self.places[number]
        self.stream.seek(int(start))
        return self.stream.read(int(length)).decode("utf-8", "surrogatepass")

    def _shingles(self, number: int) -> Hashes | None:
        start, key, text = (int(x) for x in self.places[number])
        if text < 0:
            return None
        self.stream.seek(start + key)
        return np.unique(shingle_hashes(self.stream.read(text).decode("utf-8", "surrogatepass")))


class _State:
    """Of this process, which is one of several."""

    texts: Texts
    index: Index | None
    kind = "union"
    rounds = 1
    seed = 0


def _prepare(path: str, places: NDArray[np.int64], index: Index | None, kind: str, rounds: int, seed: int) -> None:
    _State.texts, _State.index, _State.kind = Texts(path, places), index, kind
    _State.rounds, _State.seed = rounds, seed


def _similarity(a: int, b: int) -> float:
    if _State.index is not None and _State.kind == "union" and _State.index.hopeless(a, b, LEAST):
        return 0.0
    first, second = _State.texts.shingles(a), _State.texts.shingles(b)
    if first is None or second is None:
        assert _State.index is not None
        return _State.index.estimate(a, b, _State.kind)
    return similarity(first, second, _State.kind)


Pairs = list[tuple[int, list[tuple[int, float]]]]


def _compare(buckets: Sequence[NDArray[np.int64]]) -> Pairs:
    """In each bucket, documents and those that are like them.

    A document is compared with all others, and those that are like it leave the bucket; so many rounds, or until
    nothing is left.
    """
    found: Pairs = []
    for bucket in buckets:
        left = bucket.tolist()
        generator = random.Random(f"{_State.seed} {left[0]} {len(left)}")
        rounds = _State.rounds
        while len(left) > 1 and rounds:
            main = left.pop(generator.randrange(len(left)) if rounds > 0 else 0)
            similar = [(other, _similarity(main, other)) for other in left]
            alike = [(other, value) for other, value in similar if value > LEAST]
            if alike:
                gone = {other for other, _ in alike}
                left = [other for other in left if other not in gone]
                found.append((main, alike))
            rounds -= 1
    return found


def read_all(options: argparse.Namespace, corpus: Corpus, report: Report) -> None:
    """Fingerprints all inputs.

    Raises:
        UserError: naming the file and the line that is no document.
    """

    def parts() -> Iterator[_Lines]:
        for path, key in zip(options.inputs[::2], options.inputs[1::2], strict=True):
            first = 1
            for chunk in in_chunks(lines(path)):
                yield _Lines(
                    first, path, key, options.key, chunk, options.skip_bad_lines, options.num_seeds, options.seed
                )
                first += len(chunk)

    with progress((), "fingerprints") as bar:
        for found, rows, sizes, bad in in_processes(_fingerprint, parts(), options.workers):
            if bad:
                report.add(BAD_LINE, bad)
            if found:
                corpus.rows.append(rows)
                corpus.sizes.append(sizes)
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


def merged(pairs: Iterable[Pairs]) -> dict[int, list[tuple[int, float]]]:
    """What the buckets say: every pair once, under its earlier document, in the order of the documents.

    An earlier document then stands before those that are like it wherever groups are made of them.
    """
    seen: dict[tuple[int, int], float] = {}
    for some in pairs:
        for main, alike in some:
            seen.update(((min(main, other), max(main, other)), value) for other, value in alike)
    found: dict[int, list[tuple[int, float]]] = {}
    for (first, second), value in sorted(seen.items()):
        found.setdefault(first, []).append((second, value))
    return found


def check(options: argparse.Namespace) -> None:
    """Checks the flags.

    Raises:
        UserError: when they make no sense.
    """
    if len(options.inputs) % 2:
        raise UserError("--inputs: give a file and the field that names its documents, then the next file and field")
    if options.num_bands < 1 or options.num_seeds < 1 or options.num_seeds % options.num_bands:
        raise UserError(f"--num-bands {options.num_bands} does not divide --num-seeds {options.num_seeds}")
    if options.heuristic_iter < -1 or options.heuristic_iter == 0:
        raise UserError(f"--heuristic-iter {options.heuristic_iter}: give at least 1, or -1 for all")
    if not options.inputs and not options.load_fingerprints:
        raise UserError("--inputs is missing")
    if not options.output and not options.save_fingerprints:
        raise UserError("--output is missing (or --save-fingerprints)")


def run(options: argparse.Namespace) -> Report:
    """Finds the duplicates of some files.

    Raises:
        UserError: for files that cannot be read or written.
    """
    check(options)
    report = Report()
    folder = Path(options.output or options.save_fingerprints).resolve().parent
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; make it first")
    with tempfile.NamedTemporaryFile(prefix="texts-", dir=folder) as spill:
        corpus = Corpus(spill.file)  # type: ignore[arg-type]
        if options.load_fingerprints:
            old, keys = Index.load(Path(options.load_fingerprints), options.num_seeds, options.seed)
            corpus.rows.append(old.rows)
            corpus.sizes.append(old.sizes)
            for key in keys:
                corpus.add(key, None)
        read_all(options, corpus, report)
        if not corpus.rows:
            raise UserError("the inputs hold no document")
        index, places = corpus.index(options.seed)
        report.add("documents", len(places))
        report.add("bytes of fingerprints a document", index.bytes_per_document)
        texts = Texts(spill.name, places)
        if options.save_fingerprints:
            index.save(Path(options.save_fingerprints), [texts.key(number) for number in range(len(places))])
        if options.output:
            # Fingerprints stand in for missing texts, and rule pairs out; other processes get them for the first alone.
            alone = options.workers == 1 or not options.jaccard_parallel
            prints = index if options.load_fingerprints or alone else None
            settings = (spill.name, places, prints, options.jaccard, options.heuristic_iter, options.seed)
            _write_duplicates(options, index, texts, settings, report)
    return report


def _write_duplicates(
    options: argparse.Namespace, index: Index, texts: Texts, settings: tuple[Any, ...], report: Report
) -> None:
    left_out = _repeated(texts, len(texts.places))
    if left_out.any():
        report.add("repeated names, of which the first counts", int(left_out.sum()))
    buckets = progress(index.buckets(options.num_bands, left_out), "buckets")
    workers = options.workers if options.jaccard_parallel else 1
    results = in_processes(_compare, in_chunks(buckets, _BUCKETS), workers, _prepare, settings)
    report.add("pairs", 0)
    with writing(options.output) as write:
        for first, others in merged(results).items():
            write(encode({texts.key(first): [{texts.key(other): round(value, 6)} for other, value in others]}))
            report.add("pairs", len(others))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="find_duplicates.py", description=__doc__)
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
    return command(parser, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

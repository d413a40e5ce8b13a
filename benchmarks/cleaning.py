"""Speed and quality of find_duplicates.py compared with a plain loop over datasketch.

    make bench-cleaning                        20,000 synthetic documents (about two minutes)
    make bench-cleaning ARGS="--documents 2000"

The documents consist of sentences of the Python library's documentation, so that their words and lengths are realistic.
Copies with 5% and 10% of their words changed are planted among them: "found" is the share of the planted pairs that
are in the output, and "alike" the share of the output's pairs that are planted or truly similar (Jaccard similarity of
five-character shingles above 0.5). Each tool runs in a single process, so rates are per core. Prints a table, and
writes its figures to --out as JSON.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Column, Table, device_name, header, write_record
from benchmarks.runs import run
from benchmarks.turns import in_turns, timed
from megatron.data.lines import lines

MIN_DOCUMENTS = 20
"""Enough documents for copies of both kinds."""

_TIMING_PROGRAM = """
import importlib, sys, time
tool = importlib.import_module(f"tools.openwebtext.{sys.argv[1]}")
start = time.perf_counter()
status = tool.main(sys.argv[2:])
print(time.perf_counter() - start)
sys.exit(status)
"""
"""Runs a tool and prints its seconds, without the start of its process."""

TABLE = Table(
    Column("", "side"),
    Column("documents/s", "per_s", ",.0f"),
    Column("x the plain loop", "speed_up", ".1f"),
    Column("found, 5% changed", "found_5", ".3f"),
    Column("found, 10% changed", "found_10", ".3f"),
    Column("of its pairs alike", "alike", ".3f"),
    Column("pairs", "pairs", ",d"),
)


def sentences() -> list[str]:
    """Sentences of the documentation of Python's library."""
    pieces = re.split(r"(?<=[.!?])\s+|\n\n", "\n".join(pydoc_data.topics.topics.values()))
    return [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 4]


def documents(count: int, source: Sequence[str], seed: int = 1) -> Iterator[dict[str, Any]]:
    """Documents; every tenth is a changed copy of an earlier document."""
    generator = random.Random(seed)
    vocabulary = [word for sentence in source for word in sentence.split()]
    originals: list[list[str]] = []
    for number in range(count):
        if number % 10 == 9:
            original = generator.randrange(len(originals))
            words = list(originals[original])
            share = 0.05 if number % 20 == 9 else 0.1
            for index in generator.sample(range(len(words)), int(share * len(words))):
                words[index] = generator.choice(vocabulary)
            yield {"url": f"copy-{number}", "text": " ".join(words), "of": f"original-{original}", "changed": share}
            continue
        # The sentences repeat; random words keep the documents apart.
        words = " ".join(generator.choices(source, k=generator.randrange(6, 40))).split()
        for index in range(0, len(words), 3):
            words[index] = generator.choice(vocabulary)
        yield {"url": f"original-{len(originals)}", "text": " ".join(words)}
        originals.append(words)


def datasketch_loop(path: Path, threshold: float, permutations: int) -> list[tuple[str, str]]:
    """Pairs of a plain loop over datasketch."""
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(threshold=threshold, num_perm=permutations)
    pairs = []
    for line in lines(path):
        document = json.loads(line)
        text, key = document["text"], document["url"]
        fingerprint = MinHash(num_perm=permutations)
        fingerprint.update_batch([text[i : i + 5].encode() for i in range(len(text) - 4)])
        pairs += [(other, key) for other in lsh.query(fingerprint)]
        lsh.insert(key, fingerprint)
    return pairs


def seconds(tool: str, *flags: object) -> float:
    """Seconds of a tool in a separate process.

    Raises:
        SystemExit: when it fails, with its output.
    """
    with tempfile.NamedTemporaryFile() as log:
        run(["-c", _TIMING_PROGRAM, tool, *map(str, flags)], Path(log.name))
        return float(log.read().split()[-1])


def quality(data: Path, pairs: set[tuple[str, str]]) -> dict[str, float]:
    """Recall of planted pairs by the share of words changed, and precision of all pairs."""
    rows = {row["url"]: row for row in map(json.loads, lines(data))}
    planted = {tuple(sorted((row["of"], row["url"]))): row["changed"] for row in rows.values() if "of" in row}

    def recall(share: float) -> float:
        return float(np.mean([pair in pairs for pair, changed in planted.items() if changed == share]))

    def alike(a: str, b: str) -> bool:
        texts = rows[a]["text"], rows[b]["text"]
        shingles_a, shingles_b = ({text[i : i + 5] for i in range(len(text) - 4)} for text in texts)
        return len(shingles_a & shingles_b) > 0.5 * len(shingles_a | shingles_b)

    right = sum(pair in planted or alike(*pair) for pair in pairs)
    return {
        "found_5": recall(0.05),
        "found_10": recall(0.1),
        "alike": right / len(pairs) if pairs else 1.0,
        "pairs": len(pairs),
    }


def read_pairs(path: Path) -> set[tuple[str, str]]:
    """Pairs in the output of find_duplicates.py."""
    pairs: set[tuple[str, str]] = set()
    for line in lines(path):
        for key, neighbors in json.loads(line).items():
            pairs.update((min(key, other), max(key, other)) for similar in neighbors for other in similar)
    return pairs


def compare(rows: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Let the plain loop and find_duplicates, in 20 and in 10 bands, take turns; return a row for each."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    loop_pairs: list[tuple[str, str]] = []
    turn_by_side = {"a plain loop over datasketch, 100 permutations, threshold 0.5":
             partial(timed, lambda: loop_pairs.extend(datasketch_loop(data, 0.5, 100)))}  # fmt: skip
    outputs = {bands: folder / f"pairs-{bands}" for bands in (20, 10)}
    flags = ["--inputs", data, "url", "--heuristic-iter", -1, "--workers", 1]
    for bands, output in outputs.items():
        side = partial(seconds, "find_duplicates", *flags, "--output", output, "--num-bands", bands)
        turn_by_side[f"find_duplicates, 100 seeds in {bands} bands"] = side
    turns = in_turns(*turn_by_side.values(), turns=1)
    pairs = [{(min(pair), max(pair)) for pair in loop_pairs}, *map(read_pairs, outputs.values())]
    return [
        {"side": side, "per_s": len(rows) / turns.median(n), "speed_up": 1 / turns.ratio(n), **quality(data, pairs[n])}
        for n, side in enumerate(turn_by_side)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000, metavar="N", help="number of documents (20000)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/cleaning"), help="folder of the figures")
    options = parser.parse_args(arguments)
    if options.documents < MIN_DOCUMENTS:
        print(f"bench: error: --documents {options.documents}: give at least {MIN_DOCUMENTS}", file=sys.stderr)
        return 2
    rows = list(documents(options.documents, sentences()))
    with tempfile.TemporaryDirectory(prefix="bench-cleaning-") as name:
        figures = compare(rows, Path(name))
    print(TABLE.text(figures))
    write_record(options.out / "rows.json", header(device_name("cpu")), documents=len(rows), rows=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

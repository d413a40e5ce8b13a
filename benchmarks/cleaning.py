"""Documents a second of each cleaning step, and of find_duplicates.py beside a plain loop over datasketch.

    make bench-cleaning                        20,000 synthetic documents (about three minutes)
    make bench-cleaning ARGS="--documents 2000"

The documents are made of sentences of the given text (--text, default: the documentation of Python's library), so that
their words and lengths are real. Copies with a tenth and a twentieth of their words changed are planted among them;
"found" is the share of the planted pairs that came out, "alike" the share of the pairs that came out that are planted
or alike in truth (Jaccard above 0.5 over all runs of five characters). One process each: rates are those of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import REPO
from megatron.base.errors import UserError
from megatron.data.lines import lines

LEAST = 20
"""Documents, so that there are copies of both kinds."""

_TIMED = """
import importlib, sys, time
tool = importlib.import_module(f"tools.openwebtext.{sys.argv[1]}")
start = time.perf_counter()
status = tool.main(sys.argv[2:])
print(time.perf_counter() - start)
sys.exit(status)
"""
"""Runs a tool in a process of its own and prints its seconds, without those of its start."""


def sentences(path: str | None) -> list[str]:
    """Sentences of real text.

    Raises:
        UserError: when the file cannot be read, or holds none.
    """
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {path}: {getattr(error, 'strerror', None) or 'is no text in UTF-8'}") from error
    else:
        import pydoc_data.topics

        text = "\n".join(pydoc_data.topics.topics.values())
    found = [one.strip() for one in re.split(r"(?<=[.!?])\s+|\n\n", text)]
    found = [" ".join(one.split()) for one in found if len(one.split()) > 4]
    if not found:
        raise UserError(f"--text {path}: holds no sentence of five words")
    return found


def documents(count: int, source: Sequence[str], seed: int = 1) -> Iterator[dict[str, Any]]:
    """Documents of which one in ten is a changed copy of an earlier one."""
    generator = random.Random(seed)
    vocabulary = [word for one in source for word in one.split()]
    originals: list[list[str]] = []
    for number in range(count):
        if number % 10 == 9:
            of = generator.randrange(len(originals))
            words = list(originals[of])
            share = 0.05 if number % 20 == 9 else 0.1
            for place in generator.sample(range(len(words)), int(share * len(words))):
                words[place] = generator.choice(vocabulary)
            yield {"url": f"copy-{number}", "text": " ".join(words), "of": f"original-{of}", "changed": share}
            continue
        # Sentences of so few sources repeat; words of their own keep documents apart.
        words = " ".join(generator.choices(source, k=generator.randrange(6, 40))).split()
        for place in range(0, len(words), 3):
            words[place] = generator.choice(vocabulary)
        yield {"url": f"original-{len(originals)}", "text": " ".join(words)}
        originals.append(words)


def datasketch_loop(path: Path, threshold: float, permutations: int) -> list[tuple[str, str]]:
    """Pairs that a plain loop finds."""
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(threshold=threshold, num_perm=permutations)
    pairs = []
    for line in lines(path):
        found = json.loads(line)
        text, key = found["text"], found["url"]
        fingerprint = MinHash(num_perm=permutations)
        fingerprint.update_batch([text[i : i + 5].encode() for i in range(len(text) - 4)])
        pairs += [(other, key) for other in lsh.query(fingerprint)]
        lsh.insert(key, fingerprint)
    return pairs


def seconds(tool: str, *flags: object) -> float:
    """How long a tool takes.

    Raises:
        SystemExit: when it fails, with what it says.
    """
    command = [sys.executable, "-c", _TIMED, tool, *map(str, flags)]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {tool} failed with status {done.returncode}\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def runs_of(text: str) -> set[str]:
    """A text's runs of five characters."""
    return {text[i : i + 5] for i in range(len(text) - 4)}


def quality(data: Path, pairs: set[tuple[str, str]]) -> tuple[dict[float, float], float]:
    """Recall of planted pairs by the share of words changed, and precision of all pairs."""
    rows = {row["url"]: row for row in map(json.loads, lines(data))}
    planted = {tuple(sorted((row["of"], row["url"]))): row["changed"] for row in rows.values() if "of" in row}
    recall = {
        share: float(np.mean([pair in pairs for pair, own in planted.items() if own == share])) for share in (0.05, 0.1)
    }

    def alike(a: str, b: str) -> bool:
        one, other = (runs_of(rows[key]["text"]) for key in (a, b))
        return len(one & other) > 0.5 * len(one | other)

    right = sum(pair in planted or alike(*pair) for pair in pairs)
    return recall, right / len(pairs) if pairs else 1.0


def pairs_of(path: Path) -> set[tuple[str, str]]:
    """What find_duplicates.py wrote."""
    found: set[tuple[str, str]] = set()
    for line in lines(path):
        for key, others in json.loads(line).items():
            found.update((min(key, other), max(key, other)) for pair in others for other in pair)
    return found


def measure(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Prints the speed of each step, and what find_duplicates finds."""
    data, task, fixed = folder / "data.jsonl", folder / "task.jsonl", folder / "fixed"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    task.write_text("".join(json.dumps({"text": row["text"][200:500]}) + "\n" for row in rows[:100]))
    mean = data.stat().st_size / len(rows)
    print(f"{len(rows):,} documents of {mean:,.0f} bytes, one process\n")
    print("| step | documents/s | MB/s |\n|---|---|---|")

    def show(step: str, taken: float) -> None:
        rate = len(rows) / taken
        print(f"| {step} | {rate:,.0f} | {rate * mean / 1e6:.1f} |", flush=True)

    one, groups, found = ["--workers", 1], folder / "groups", {20: folder / "pairs", 10: folder / "wide"}
    tasks = ["remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning"]
    show("cleanup_dataset", seconds("cleanup_dataset", data, folder / "clean", *one))
    fix = ["--input-files", data, "--output-path", fixed, "--tasks", *tasks, *one]
    show("cleanup_fix_dataset, four tasks", seconds("cleanup_fix_dataset", *fix))
    find = ["--inputs", data, "url", "--heuristic-iter", -1, *one, "--output"]
    taken = {bands: seconds("find_duplicates", *find, out, "--num-bands", bands) for bands, out in found.items()}
    for bands in found:
        show(f"find_duplicates, 100 seeds in {bands} bands", taken[bands])
    start = time.perf_counter()
    plain = datasketch_loop(data, 0.5, 100)
    theirs = time.perf_counter() - start
    show("a plain loop over datasketch, 100 permutations, threshold 0.5", theirs)
    show("group_duplicate_url", seconds("group_duplicate_url", found[20], groups))
    show("remove_group_duplicates", seconds("remove_group_duplicates", groups, data, folder / "kept"))
    ngrams = ["--task-files", task, "text", "--dedup-dataset", data, "text", "--output", folder / "filtered"]
    show("filter_ngrams, two passes", seconds("filter_ngrams", *ngrams, "--num-threads", 1))
    number = ["--input-file", data, "--output-file", folder / "numbered", "--id-prefix", "x"]
    show("add_id", seconds("add_id", *number))
    show("merge_jsons", seconds("merge_jsons", "--json_path", fixed, "--output_file", folder / "merged"))
    of_20, of_10 = theirs / taken[20], theirs / taken[10]
    print(f"\nfind_duplicates with 20 bands: {of_20:.1f} x the plain loop; with 10: {of_10:.1f} x")
    pairs = {f"{bands} bands": pairs_of(path) for bands, path in found.items()}
    for what, some in (pairs | {"the plain loop": {(min(pair), max(pair)) for pair in plain}}).items():
        recall, precision = quality(data, some)
        shares = ", ".join(
            f"{value:.3f} of copies with {share:.0%} of their words changed" for share, value in recall.items()
        )
        print(f"{what}: found {shares}; {precision:.3f} of its {len(some):,} pairs are alike")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000, metavar="N", help="(20000)")
    parser.add_argument("--text", metavar="FILE", help="that the documents are made of")
    options = parser.parse_args(arguments)
    try:
        if options.documents < LEAST:
            raise UserError(f"--documents {options.documents}: give at least {LEAST}")
        rows = list(documents(options.documents, sentences(options.text)))
    except UserError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-cleaning-") as name:
        measure(rows, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
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
import contextlib
import io
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from megatron.base.errors import UserError
from megatron.data.lines import lines
from tools.openwebtext import (
    add_id,
    cleanup_dataset,
    cleanup_fix_dataset,
    filter_ngrams,
    find_duplicates,
    group_duplicate_url,
    merge_jsons,
    remove_group_duplicates,
)  # fmt: skip
from tools.openwebtext.filtering import encode
from tools.openwebtext.fingerprints import shingle_set, similarity

LEAST = 20
"""Documents, so that there are copies of both kinds."""


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


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        result = run()
    if result:
        sys.exit(f"error: a step failed with status {result}")
    return time.perf_counter() - start


def quality(data: Path, pairs: set[tuple[str, str]]) -> tuple[dict[float, float], float]:
    """Recall of planted pairs by the share of words changed, and precision of all pairs."""
    rows = {row["url"]: row for row in map(json.loads, lines(data))}
    planted = {tuple(sorted((row["of"], row["url"]))): row["changed"] for row in rows.values() if "of" in row}
    recall = {
        share: float(np.mean([pair in pairs for pair, own in planted.items() if own == share])) for share in (0.05, 0.1)
    }

    def alike(a: str, b: str) -> bool:
        sets = [shingle_set(rows[key]["text"]) for key in (a, b)]
        return similarity(sets[0], sets[1], "union") > 0.5

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
    data, task = folder / "data.jsonl", folder / "task.jsonl"
    data.write_bytes(b"".join(encode(row) + b"\n" for row in rows))
    task.write_bytes(b"".join(encode({"text": row["text"][200:500]}) + b"\n" for row in rows[:100]))
    mean = data.stat().st_size / len(rows)
    print(f"{len(rows):,} documents of {mean:,.0f} bytes, one process\n")
    print("| step | documents/s | MB/s |\n|---|---|---|")

    def show(step: str, seconds: float) -> None:
        rate = len(rows) / seconds
        print(f"| {step} | {rate:,.0f} | {rate * mean / 1e6:.1f} |", flush=True)

    one, out = ["--workers", "1"], [str(folder / f"out{n}.jsonl") for n in range(8)]
    (folder / "fixed").mkdir()
    tasks = ["remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning"]
    show("cleanup_dataset", timed(lambda: cleanup_dataset.main([str(data), out[0], *one])))
    fix = ["--input-files", str(data), "--output-path", str(folder / "fixed"), "--tasks", *tasks, *one]
    show("cleanup_fix_dataset, four tasks", timed(lambda: cleanup_fix_dataset.main(fix)))
    find = ["--inputs", str(data), "url", "--heuristic-iter", "-1", *one]
    ours = timed(lambda: find_duplicates.main([*find, "--num-bands", "20", "--output", out[1]]))
    show("find_duplicates, 100 seeds in 20 bands", ours)
    wide = timed(lambda: find_duplicates.main([*find, "--output", out[7]]))
    show("find_duplicates, 100 seeds in 10 bands", wide)
    plain: list[tuple[str, str]] = []
    theirs = timed(lambda: plain.extend(datasketch_loop(data, 0.5, 100)))
    show("a plain loop over datasketch, 100 permutations, threshold 0.5", theirs)
    show("group_duplicate_url", timed(lambda: group_duplicate_url.main([out[1], out[2]])))
    show("remove_group_duplicates", timed(lambda: remove_group_duplicates.main([out[2], str(data), out[3]])))
    ngrams = ["--task-files", str(task), "text", "--dedup-dataset", str(data), "text", "--output", out[4]]
    show("filter_ngrams, two passes", timed(lambda: filter_ngrams.main([*ngrams, "--num-threads", "1"])))
    show(
        "add_id",
        timed(lambda: add_id.main(["--input-file", str(data), "--output-file", out[5], "--id-prefix", "x"])),
    )
    merge = ["--json_path", str(folder / "fixed"), "--output_file", out[6]]
    show("merge_jsons", timed(lambda: merge_jsons.main(merge)))
    print(f"\nfind_duplicates with 20 bands: {theirs / ours:.1f} x the plain loop; with 10: {theirs / wide:.1f} x")
    found = (("20 bands", pairs_of(Path(out[1]))), ("10 bands", pairs_of(Path(out[7]))))
    for what, pairs in (*found, ("the plain loop", {(min(pair), max(pair)) for pair in plain})):
        recall, precision = quality(data, pairs)
        shares = ", ".join(
            f"{value:.3f} of copies with {share:.0%} of their words changed" for share, value in recall.items()
        )
        print(f"{what}: found {shares}; {precision:.3f} of its {len(pairs):,} pairs are alike")


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
    raise SystemExit(main())

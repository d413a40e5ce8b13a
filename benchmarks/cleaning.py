"""Documents a second of each cleaning step, and of find_duplicates.py beside a plain loop over datasketch.

    make bench-cleaning                        20,000 synthetic documents (about three minutes)
    make bench-cleaning ARGS="--documents 2000"

Prints tables, and writes their figures to --out as JSON.

The documents are made of sentences of the given text (--text, default: the documentation of Python's library), so that
their words and lengths are real. Copies with a tenth and a twentieth of their words changed are planted among them;
"found" is the share of the planted pairs that came out, "alike" the share of the pairs that came out that are planted
or alike in truth (Jaccard above 0.5 over all runs of five characters). One process each: rates are those of a core.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import device_name, header, write_record
from benchmarks.runs import run
from benchmarks.tables import Column, Table
from benchmarks.turns import in_turns, timed
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
"""Runs a tool and prints its seconds, without those of the start of its process."""

STEPS = Table(Column("step", "step"), Column("documents/s", "per_s", ",.0f"), Column("MB/s", "mb_per_s", ".1f"))

FOUND = Table(
    Column("", "side"),
    Column("x the plain loop", "speed_up", ".1f"),
    Column("found, 5% changed", "found_5", ".3f"),
    Column("found, 10% changed", "found_10", ".3f"),
    Column("of its pairs alike", "alike", ".3f"),
    Column("pairs", "pairs", ",d"),
)


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
    """How long a tool takes in a process of its own.

    Raises:
        SystemExit: when it fails, with what it says.
    """
    with tempfile.NamedTemporaryFile() as log:
        run(["-c", _TIMED, tool, *map(str, flags)], Path(log.name))
        return float(log.read().split()[-1])


def runs_of(text: str) -> set[str]:
    """A text's runs of five characters."""
    return {text[i : i + 5] for i in range(len(text) - 4)}


def quality(data: Path, pairs: set[tuple[str, str]]) -> dict[str, float]:
    """Recall of planted pairs by the share of words changed, and precision of all pairs."""
    rows = {row["url"]: row for row in map(json.loads, lines(data))}
    planted = {tuple(sorted((row["of"], row["url"]))): row["changed"] for row in rows.values() if "of" in row}

    def recall(share: float) -> float:
        return float(np.mean([pair in pairs for pair, own in planted.items() if own == share]))

    def alike(a: str, b: str) -> bool:
        one, other = (runs_of(rows[key]["text"]) for key in (a, b))
        return len(one & other) > 0.5 * len(one | other)

    right = sum(pair in planted or alike(*pair) for pair in pairs)
    return {
        "found_5": recall(0.05),
        "found_10": recall(0.1),
        "alike": right / len(pairs) if pairs else 1.0,
        "pairs": len(pairs),
    }


def pairs_of(path: Path) -> set[tuple[str, str]]:
    """What find_duplicates.py wrote."""
    found: set[tuple[str, str]] = set()
    for line in lines(path):
        for key, others in json.loads(line).items():
            found.update((min(key, other), max(key, other)) for pair in others for other in pair)
    return found


def compare(data: Path, found: Mapping[int, Path]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Lets find_duplicates and the plain loop take turns.

    Args:
        data: the documents.
        found: files of the duplicates, by the number of bands.

    Returns:
        Seconds of each side, and the rows of the table of what they found.
    """
    plain: list[tuple[str, str]] = []
    flags = ["--inputs", data, "url", "--heuristic-iter", -1, "--workers", 1]
    sides = {"a plain loop over datasketch, 100 permutations, threshold 0.5":
             partial(timed, lambda: plain.extend(datasketch_loop(data, 0.5, 100)))}  # fmt: skip
    for bands, out in found.items():
        side = partial(seconds, "find_duplicates", *flags, "--output", out, "--num-bands", bands)
        sides[f"find_duplicates, 100 seeds in {bands} bands"] = side
    turns = in_turns(*sides.values(), turns=1)
    pairs = [{(min(pair), max(pair)) for pair in plain}, *map(pairs_of, found.values())]
    rows = [
        {"side": side, "speed_up": 1 / turns.ratio(number), **quality(data, pairs[number])}
        for number, side in enumerate(sides)
    ]
    return {side: turns.median(number) for number, side in enumerate(sides)}, rows


def measure(rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Measures the speed of each step, and what find_duplicates finds; prints both."""
    data, task, fixed = folder / "data.jsonl", folder / "task.jsonl", folder / "fixed"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    task.write_text("".join(json.dumps({"text": row["text"][200:500]}) + "\n" for row in rows[:100]))
    mean = data.stat().st_size / len(rows)
    print(f"{len(rows):,} documents of {mean:,.0f} bytes, one process\n\n{STEPS.head()}")
    steps: list[dict[str, Any]] = []

    def show(step: str, taken: float) -> None:
        rate = len(rows) / taken
        steps.append({"step": step, "per_s": rate, "mb_per_s": rate * mean / 1e6})
        print(STEPS.line(steps[-1]), flush=True)

    one, groups, found = ["--workers", 1], folder / "groups", {20: folder / "pairs", 10: folder / "wide"}
    tasks = ["remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning"]
    show("cleanup_dataset", seconds("cleanup_dataset", data, folder / "clean", *one))
    fix = ["--input-files", data, "--output-path", fixed, "--tasks", *tasks, *one]
    show("cleanup_fix_dataset, four tasks", seconds("cleanup_fix_dataset", *fix))
    taken, compared = compare(data, found)
    for side, of_side in taken.items():
        show(side, of_side)
    show("group_duplicate_url", seconds("group_duplicate_url", found[20], groups))
    show("remove_group_duplicates", seconds("remove_group_duplicates", groups, data, folder / "kept"))
    ngrams = ["--task-files", task, "text", "--dedup-dataset", data, "text", "--output", folder / "filtered"]
    show("filter_ngrams, two passes", seconds("filter_ngrams", *ngrams, "--num-threads", 1))
    number = ["--input-file", data, "--output-file", folder / "numbered", "--id-prefix", "x"]
    show("add_id", seconds("add_id", *number))
    show("merge_jsons", seconds("merge_jsons", "--json_path", fixed, "--output_file", folder / "merged"))
    print("\n" + FOUND.text(compared))
    return {"documents": len(rows), "mean_bytes": mean, "steps": steps, "found": compared}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000, metavar="N", help="(20000)")
    parser.add_argument("--text", metavar="FILE", help="that the documents are made of")
    parser.add_argument("--out", type=Path, default=Path("bench_out/cleaning"), help="folder of the figures")
    options = parser.parse_args(arguments)
    try:
        if options.documents < LEAST:
            raise UserError(f"--documents {options.documents}: give at least {LEAST}")
        rows = list(documents(options.documents, sentences(options.text)))
    except UserError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-cleaning-") as name:
        found = measure(rows, Path(name))
    write_record(options.out / "rows.json", header(device_name("cpu")), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""A whole cleaning: from scraped pages to shuffled training data, with a report of what each step dropped.

    python tools/openwebtext/pipeline.py --json pages.jsonl.zst --output-path cleaned
    python tools/openwebtext/pipeline.py --json a.jsonl b.jsonl --urls folder_of_txt_files --output-path cleaned \\
        --lambada-path lambada_test.jsonl --vocab-file vocab.json --merge-file merges.txt

Steps, in this order, each a tool of this folder:

    blacklist_urls            (with --urls) URLs that may lead to a text; pages of others are left out
    merge                     all inputs in one file
    cleanup_dataset           encoding, English, at least 128 tokens
    cleanup_fix_dataset       the kinds of --fix-tasks
    find_duplicates, group_duplicate_url, remove_group_duplicates
    filter_ngrams             (with --lambada-path or --task-files) what evaluation tasks are made of
    shuffle, add_id           train_data.json

A step's output is there when it is complete. Called again, the steps that are done with the same inputs and settings
are left out, so that an interrupted cleaning goes on. What lies between the steps is in the folder steps, which a
finished cleaning removes unless --keep is given.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.config.errors import UserError
from tools.openwebtext import (
    blacklist_urls,
    cleanup_dataset,
    cleanup_fix_dataset,
    filter_ngrams,
    find_duplicates,
    group_duplicate_url,
    remove_group_duplicates,
)  # fmt: skip
from tools.openwebtext.cleanup_fix_dataset import FIXES, REMOVALS
from tools.openwebtext.streams import (
    Report,
    add_common,
    check_apart,
    command,
    document,
    encode,
    external_shuffle,
    lines,
    progress,
    writing,
)  # fmt: skip

REPORT = "report.json"

STEPS = "steps"
"""Folder of what lies between the steps, in that of the result."""

KEY = "cleaning_key"
"""Field that names a document between the steps: URLs may be missing, or repeated."""


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: of it.
        output: the file that it writes, complete or not at all.
        settings: what its output depends on besides its inputs.
        run: does it.
    """

    name: str
    output: Path
    settings: Any
    run: Callable[[], Report]


def _page(url: str) -> bytes:
    """A fingerprint of the page that a URL leads to, whatever part of it."""
    return hashlib.blake2b(url.split("#", 1)[0].encode("utf-8", "surrogatepass"), digest_size=16).digest()


def merge(paths: Sequence[str], urls: Path | None, output: Path, skip_bad: bool) -> Report:
    """Puts the documents of some files into one, each with a key of its own; with ``urls``, only pages of those.

    Raises:
        UserError: naming the line that is no document.
    """
    allowed = None if urls is None else {_page(url.decode("utf-8", "replace")) for url in lines(urls)}
    report = Report()
    report.add("documents", 0)
    with writing(output) as write:
        for path in paths:
            for number, line in enumerate(progress(lines(path), Path(path).name), 1):
                report.add("documents")
                try:
                    found = document(line, f"{path}, line {number}")
                except UserError:
                    if not skip_bad:
                        raise
                    report.add("bad lines skipped")
                    continue
                url = found.get("url")
                if allowed is not None and not (isinstance(url, str) and _page(url) in allowed):
                    report.add("of URLs that are left out" if url else "without a url")
                    continue
                report.add("written")
                write(encode({**found, KEY: str(report.counts["written"])}))
    return report


def shuffle_and_number(source: Path, output: Path, prefix: str, seed: int) -> Report:
    """The last step."""
    report = Report()
    report.add("written", 0)
    with writing(output) as write:

        def numbered(line: bytes) -> None:
            found = json.loads(line)
            del found[KEY]
            found["adlr_id"] = f"{prefix}-{report.counts['written'] + 1:010d}"
            write(encode(found))
            report.add("written")

        external_shuffle(source, numbered, seed)
    return report


def _options(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**values)


def steps_of(options: argparse.Namespace) -> list[Step]:
    """The steps that the flags ask for, each reading what the one before it wrote."""
    folder = Path(options.output_path) / STEPS
    shared = {"workers": options.workers, "skip_bad_lines": options.skip_bad_lines}
    steps: list[Step] = []

    def add(name: str, output: str, settings: Any, run: Callable[[Path], Report]) -> Path:
        path = (folder.parent if name == "shuffle" else folder) / output
        steps.append(Step(name, path, settings, lambda: run(path)))
        return path

    urls = None
    if options.urls:
        blacklist = _options(input=options.urls, domains_file=None, extensions_file=None)
        urls = add("blacklist_urls", "urls.txt", options.urls,
                   lambda out: blacklist_urls.run(_options(**vars(blacklist), output=out)))  # fmt: skip
    now = add("merge", "merged.jsonl.zst", [options.json, options.urls],
              lambda out: merge(options.json, urls, out, options.skip_bad_lines))  # fmt: skip
    cleanup = {"key": "text", "language": options.language, "min_tokens": options.min_tokens,
               "vocab_file": options.vocab_file, "merge_file": options.merge_file}  # fmt: skip
    merged = now
    now = add("cleanup_dataset", "clean.jsonl.zst", cleanup,
              lambda out: cleanup_dataset.run(_options(input=merged, output=out, **cleanup, **shared)))  # fmt: skip
    clean = now
    if options.fix_tasks:
        fix = {"input_files": [clean], "tasks": options.fix_tasks, "output_path": folder, "key": "text"}
        now = add("cleanup_fix_dataset", "clean_cleaned.jsonl.zst", options.fix_tasks,
                  lambda out: cleanup_fix_dataset.run(_options(**fix, **shared)))  # fmt: skip
    fixed = now
    find = {"key": "text", "load_fingerprints": None, "save_fingerprints": None, "jaccard": "union",
            "heuristic_iter": -1, "num_bands": options.num_bands, "num_seeds": options.num_seeds,
            "jaccard_parallel": True, "seed": options.seed}  # fmt: skip
    pairs = add("find_duplicates", "duplicates.jsonl.zst", find, lambda out: find_duplicates.run(
        _options(inputs=[fixed, KEY], output=out, **find, **shared)))  # fmt: skip
    groups = add("group_duplicate_url", "groups.jsonl.zst", options.threshold, lambda out: group_duplicate_url.run(
        _options(input=pairs, output=out, threshold=options.threshold, skip_bad_lines=False)))  # fmt: skip
    now = add("remove_group_duplicates", "deduplicated.jsonl.zst", None, lambda out: remove_group_duplicates.run(
        _options(groups=groups, data=fixed, output=out, key=KEY, skip_bad_lines=False)))  # fmt: skip
    if options.lambada_path or options.task_files:
        deduplicated = now
        ngrams = {"tasks": ["lambada"] if options.lambada_path else [], "lambada_path": options.lambada_path,
                  "task_files": options.task_files, "max_ngram_size": 13, "min_ngram_size": 8,
                  "filter_text_char_len": 200, "key_threshold": 10, "save_dictionary": None, "load_dictionary": None,
                  "splits_count": 10, "remove_char_each_side": 200}  # fmt: skip
        now = add("filter_ngrams", "filtered.jsonl.zst", ngrams, lambda out: filter_ngrams.run(_options(
            dedup_dataset=(deduplicated, "text"), output=out, num_threads=options.workers, skip_bad_lines=False,
            **ngrams)))  # fmt: skip
    last = now
    add("shuffle", "train_data.json", [options.seed, options.id_prefix],
        lambda out: shuffle_and_number(last, out, options.id_prefix, options.seed))  # fmt: skip
    return steps


def _inputs_of(options: argparse.Namespace) -> list[Any]:
    """Names, sizes and times of the files that a cleaning begins with."""
    paths = [Path(path) for path in options.json]
    if options.urls:
        paths += [*sorted(Path(options.urls).glob("*.txt*")), *sorted(blacklist_urls.LISTS.glob("*.txt"))]
    paths += [Path(path) for path in (options.lambada_path, options.vocab_file, options.merge_file) if path]
    paths += [Path(path) for path in options.task_files[::2]]
    found = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: No such file")
        state = path.stat()
        found.append([str(path), state.st_size, state.st_mtime_ns])
    return found


def stamps_of(steps: Sequence[Step], options: argparse.Namespace) -> list[str]:
    """What each step's output depends on, as text: the inputs, and the settings of the steps up to it."""
    digest = hashlib.blake2b(json.dumps(_inputs_of(options)).encode())
    stamps = []
    for step in steps:
        digest.update(json.dumps([step.name, step.settings], default=str).encode())
        stamps.append(digest.hexdigest()[:32])
    return stamps


def run(options: argparse.Namespace) -> Report:
    """Runs all steps that are not done.

    Raises:
        UserError: for files that cannot be read or written.
    """
    folder = Path(options.output_path)
    path = folder / REPORT
    steps = steps_of(options)
    check_apart([*(name for name, *_ in _inputs_of(options))], [path, *(step.output for step in steps)])
    if options.report and Path(options.report).resolve() == path.resolve():
        raise UserError(f"--report {options.report}: the cleaning keeps its own there; name another file")
    (folder / STEPS).mkdir(parents=True, exist_ok=True)
    try:
        done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path}: is no report of an earlier cleaning; remove it, or name another folder") from error
    stamps = stamps_of(steps, options)
    matches = [done.get(step.name, {}).get("stamp") == stamp for step, stamp in zip(steps, stamps, strict=True)]
    first = len(steps)
    if not (all(matches) and steps[-1].output.exists()):
        there = [match and step.output.exists() for step, match in zip(steps, matches, strict=True)]
        first = there.index(False)
    report: dict[str, Any] = {}
    for number, (step, stamp) in enumerate(zip(steps, stamps, strict=True)):
        if number < first:
            report[step.name] = done[step.name]
            print(f"{step.name}: done before", flush=True)
            continue
        start = time.monotonic()
        counts = step.run()
        seconds = round(time.monotonic() - start, 1)
        report[step.name] = {"stamp": stamp, "seconds": seconds, "counts": dict(counts.counts)}
        print(f"{step.name}: {counts} ({seconds:.1f} s)", flush=True)
        with writing(path) as write:
            write(json.dumps(report, indent=1).encode())
    if not options.keep:
        shutil.rmtree(folder / STEPS)
    total = Report()
    total.add("documents read", report["merge"]["counts"]["documents"])
    total.add("documents in train_data.json", report["shuffle"]["counts"]["written"])
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pipeline.py", description=__doc__)
    parser.add_argument(
        "--json", nargs="+", required=True, metavar="FILE", help="JSON lines with text, and url if known"
    )
    parser.add_argument("--urls", metavar="DIR", help="folder of .txt files: only pages of their URLs count")
    parser.add_argument("--output-path", required=True, metavar="DIR", help="for train_data.json and report.json")
    parser.add_argument("--language", default="en", help="that is kept (en)")
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="of a text that is kept (128)")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, to count its tokens")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    parser.add_argument(
        "--fix-tasks", nargs="*", default=["remove_256_javascript", "general_cleaning"], choices=[*REMOVALS, *FIXES],
        metavar="TASK", help="of cleanup_fix_dataset.py (remove_256_javascript general_cleaning)",
    )  # fmt: skip
    parser.add_argument("--threshold", type=float, default=0.7, metavar="X", help="similarity of duplicates (0.7)")
    parser.add_argument("--num-bands", type=int, default=20, metavar="N", help="of find_duplicates.py (20)")
    parser.add_argument("--num-seeds", type=int, default=100, metavar="N", help="of find_duplicates.py (100)")
    parser.add_argument("--lambada-path", metavar="FILE", help="remove what LAMBADA is made of")
    parser.add_argument("--task-files", nargs="*", default=[], metavar="X", help="FILE FIELD ...: of other tasks")
    parser.add_argument("--id-prefix", default="doc", metavar="WORD", help="that the numbers begin with (doc)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of the order and the fingerprints (1234)")
    parser.add_argument("--keep", action="store_true", help="keep the files between the steps")
    add_common(parser)
    return command(parser, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python
"""Runs all cleaning steps, from URLs or scraped pages to shuffled training data, with a report of each step.

    python tools/openwebtext/pipeline.py --urls folder_of_txt_files --output-path cleaned
    python tools/openwebtext/pipeline.py --json pages.jsonl.zst --output-path cleaned
    python tools/openwebtext/pipeline.py --json a.jsonl b.jsonl --urls folder_of_txt_files --output-path cleaned \\
        --lambada-path lambada_test.jsonl --vocab-file vocab.json --merge-file merges.txt

Steps, in this order; all but merge and shuffle are tools of this folder:

    blacklist_urls            (with --urls) URLs that may lead to a text
    fetch_pages               (with --urls and without --json) their pages' texts
    merge                     all inputs in one file; with --urls and --json, only pages of those URLs
    cleanup_dataset           encoding, English, at least 128 tokens
    cleanup_fix_dataset       the kinds of --fix-tasks
    find_duplicates, group_duplicate_url, remove_group_duplicates
    filter_ngrams             (with --lambada-path or --task-files) texts of evaluation tasks
    shuffle, add_id           train_data.json

A step writes its complete output or none. Run again after an interruption, or after a run with --keep, the pipeline
skips finished steps with the same inputs and settings, and fetch_pages continues where it was interrupted. Intermediate
files are in the folder steps. A finished pipeline removes them, including the fetched pages, but no other files there,
so that other settings start over and fetch again; use --keep to try several settings.

Memory: that of its steps; merging with --urls and --json holds the URLs' fingerprints, shuffling a sixteenth of the
data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.pipeline")

from megatron.base.atomic import hold_lock, remove_leftovers
from megatron.base.errors import UserError
from megatron.base.text_file import parse_json
from megatron.data.lines import lines, writing
from tools.openwebtext import (
    blacklist_urls,
    cleanup_dataset,
    cleanup_fix_dataset,
    fetch_pages,
    filter_ngrams,
    find_duplicates,
    group_duplicate_url,
    remove_group_duplicates,
)  # fmt: skip
from tools.openwebtext.add_id import numbering
from tools.openwebtext.blacklist_urls import page_of
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import Judged, encode, judge_all

REPORT = "report.json"
STEPS = "steps"
"""Folder of the intermediate files, in the folder of the result."""
KEY = "cleaning_key"
"""Field that names a document in the intermediate files, since URLs may be missing or repeated."""
OUTPUTS = {
    "blacklist_urls": "urls.txt",
    "fetch_pages": "pages.jsonl.zst",
    "merge": "merged.jsonl.zst",
    "cleanup_dataset": "clean.jsonl.zst",
    "cleanup_fix_dataset": "clean_cleaned.jsonl.zst",
    "find_duplicates": "duplicates.jsonl.zst",
    "group_duplicate_url": "groups.jsonl.zst",
    "remove_group_duplicates": "deduplicated.jsonl.zst",
    "filter_ngrams": "filtered.jsonl.zst",
    "shuffle": "train_data.json",
}
"""Output file of each step; that of the last step is in the folder of the result."""
_PARTS = 64
"""Number of temporary files of a shuffle."""


@dataclass(frozen=True)
class Step:
    """A step of a cleaning.

    Args:
        name: name of the step.
        output: its output file, complete or missing.
        settings: values that its output depends on, besides its inputs.
        run: does the work.
        check: raises a UserError for invalid flags.
    """

    name: str
    output: Path
    settings: Sequence[Any]
    run: Callable[[], Report]
    check: Callable[[], None] = lambda: None


def merge(paths: Sequence[str | Path], urls: Path | None, output: Path, skip_bad: bool) -> Report:
    """Merge the documents of files, and give each a unique key; with ``urls``, only their pages are kept."""
    allowed = None if urls is None else {page_of(url.decode("utf-8", "replace")) for url in lines(urls)}
    numbers = count(1)

    def judge(row: dict[str, Any], line: bytes, where: str) -> Judged:
        url = row.get("url")
        if allowed is not None and not (isinstance(url, str) and page_of(url) in allowed):
            return Judged(reasons=("of URLs that are left out" if url else "without a url",))
        return Judged((encode({**row, KEY: str(next(numbers))}),))

    with writing(output) as write:
        return judge_all(judge, paths, write, keys=["text"], skip_bad=skip_bad, label="merge")


def shuffled(source: Path, seed: int) -> Iterator[bytes]:
    """Lines of a file in random order: each goes to a random temporary file, which is shuffled in memory."""
    generator = random.Random(seed)
    with ExitStack() as stack:
        # Nameless files, so that none is left behind.
        parts = [stack.enter_context(tempfile.TemporaryFile(dir=source.parent)) for _ in range(_PARTS)]
        for line in lines(source):
            parts[generator.randrange(_PARTS)].write(line + b"\n")
        for part in parts:
            part.seek(0)
            part_lines = part.read().split(b"\n")[:-1]
            generator.shuffle(part_lines)
            yield from part_lines


def shuffle_and_number(source: Path, output: Path, prefix: str, seed: int) -> Report:
    """Shuffle and number the documents, the last step."""
    report, judge = Report(written=0), numbering(prefix)
    with writing(output) as write:
        for line in shuffled(source, seed):
            row = parse_json(line)
            del row[KEY]
            write(judge(row, line, "").kept[0])
            report["written"] += 1
    return report


def steps_of(options: argparse.Namespace) -> list[Step]:
    """Steps of a cleaning; each reads the output of the step before it."""
    folder = Path(os.path.abspath(options.output_path))  # absolute, so that no name begins as a flag does
    outputs = {name: folder / STEPS / file for name, file in OUTPUTS.items()} | {"shuffle": folder / OUTPUTS["shuffle"]}
    workers = [f"--workers={options.workers}"]
    steps: list[Step] = []

    def add(module: Any, words: Sequence[str | Path | None], free_words: Sequence[str] = ()) -> Path:
        """Add a tool; None among the words stands for its output. Paths and free words do not affect its output."""
        name, tool = module.__name__.rpartition(".")[2], module.main
        flags = tool.parse([*free_words, *(str(word or outputs[name]) for word in words)])
        settings = [word for word in words if isinstance(word, str)]
        steps.append(Step(name, outputs[name], settings, lambda: tool.run(flags), lambda: tool.check(flags)))
        return outputs[name]

    pages, urls = options.json, None
    if options.urls:
        urls = add(blacklist_urls, ["--", options.urls, None])
    if not pages:
        page_words, free_words = fetch_pages.limit_flags(options)
        pages, urls = [add(fetch_pages, [*page_words, "--", urls, None], [*free_words, *workers])], None
    data = outputs["merge"]
    steps.append(Step("merge", data, [options.json, options.urls],
                      lambda: merge(pages, urls, outputs["merge"], options.skip_bad_lines)))  # fmt: skip
    vocabulary = [f"--{name}-file={path}" for name, path in
                  (("vocab", options.vocab_file), ("merge", options.merge_file)) if path is not None]  # fmt: skip
    data = add(cleanup_dataset, [f"--language={options.language}", f"--min-tokens={options.min_tokens}", *vocabulary,
                                 "--", data, None], workers)  # fmt: skip
    if options.fix_tasks:
        data = add(cleanup_fix_dataset, ["--input-files", data, "--output-path", data.parent,
                                         "--tasks", *options.fix_tasks], workers)  # fmt: skip
    pairs = add(find_duplicates, ["--inputs", data, KEY, "--output", None, "--heuristic-iter=-1", "--jaccard-parallel",
                                  f"--num-bands={options.num_bands}", f"--num-seeds={options.num_seeds}",
                                  f"--seed={options.seed}"], workers)  # fmt: skip
    groups = add(group_duplicate_url, ["--", pairs, None, str(options.threshold)])
    data = add(remove_group_duplicates, [f"--key={KEY}", "--", groups, data, None])
    if options.lambada_path or options.task_files:
        lambada = ["--tasks", "lambada", f"--lambada-path={options.lambada_path}"] if options.lambada_path else []
        data = add(filter_ngrams, ["--dedup-dataset", data, "text", "--output", None, *lambada,
                                   "--task-files", *options.task_files], workers)  # fmt: skip
    last_data = data
    prefix, seed, result = options.id_prefix, options.seed, outputs["shuffle"]
    steps.append(Step("shuffle", result, [seed, prefix], lambda: shuffle_and_number(last_data, result, prefix, seed)))
    return steps


def _inputs_of(options: argparse.Namespace) -> list[Any]:
    """Names, sizes and modification times of the input files."""
    paths = [Path(path) for path in options.json]
    if options.urls:
        paths += [*blacklist_urls.files_of(Path(options.urls)), *sorted(blacklist_urls.LISTS.glob("*.txt"))]
    paths += [Path(path) for path in (options.lambada_path, options.vocab_file, options.merge_file) if path]
    paths += [Path(path) for path in options.task_files[::2]]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: No such file")
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def stamps_of(steps: Sequence[Step], options: argparse.Namespace) -> list[str]:
    """Digest, for each step, of the inputs and the settings of the steps up to it."""
    digest = hashlib.blake2b(json.dumps(_inputs_of(options)).encode())
    stamps = []
    for step in steps:
        digest.update(json.dumps([step.name, step.settings], default=str).encode())
        stamps.append(digest.hexdigest()[:32])
    return stamps


def _read_report(path: Path) -> dict[str, dict[str, Any]]:
    """Report of an earlier cleaning, by step; raise UserError if the file is none."""
    try:
        report = json.loads(path.read_text()) if path.exists() else {}
        for name, entry in report.items():
            if not (name in OUTPUTS and isinstance(entry["stamp"], str) and isinstance(entry["counts"], dict)):
                raise ValueError
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is not the report of a cleaning; remove it, or name another folder") from error
    return dict(report)


def run(options: argparse.Namespace) -> Report:
    """Run all unfinished steps."""
    if not (options.json or options.urls):
        raise UserError("--json is missing (or --urls, whose pages are then fetched)")
    folder = Path(options.output_path)
    steps = steps_of(options)
    inputs = [name for name, *_ in _inputs_of(options)]
    check_apart(inputs, [folder / REPORT, *(step.output for step in steps), options.report])
    for name in inputs:
        if (folder / STEPS).resolve() in Path(name).resolve().parents:
            raise UserError(f"{name}: is in the folder of intermediate files; move it to another folder")
    for step in steps:
        step.check()
    _read_report(folder / REPORT)
    try:
        (folder / STEPS).mkdir(parents=True, exist_ok=True)
        with hold_lock(folder, if_supported=True):
            return _run_steps(options, steps)
    except BlockingIOError as error:
        raise UserError(f"--output-path {folder}: another cleaning is running there; wait for it") from error
    except OSError as error:
        raise UserError(f"--output-path {folder}: {error.strerror or error}") from error


def _run_steps(options: argparse.Namespace, steps: Sequence[Step]) -> Report:
    path = Path(options.output_path) / REPORT
    old_report = _read_report(path)
    stamps = stamps_of(steps, options)
    matches = [old_report.get(step.name, {}).get("stamp") == stamp for step, stamp in zip(steps, stamps, strict=True)]
    num_done = len(steps)
    if not (all(matches) and steps[-1].output.exists()):
        done = [match and step.output.exists() for step, match in zip(steps, matches, strict=True)]
        num_done = done.index(False)
    report = {step.name: old_report[step.name] for step in steps[:num_done]}

    def save() -> None:
        with writing(path) as write:
            write(json.dumps(report, indent=1).encode())

    for step in steps[:num_done]:
        print(f"{step.name}: done before", flush=True)
    if num_done < len(steps):
        save()  # so that no step of an earlier cleaning, whose files are now replaced, counts as finished
    for step, stamp in list(zip(steps, stamps, strict=True))[num_done:]:
        start = time.monotonic()
        counts = step.run()
        seconds = round(time.monotonic() - start, 1)
        report[step.name] = {"stamp": stamp, "seconds": seconds, "counts": dict(counts)}
        print(f"{step.name}: {counts} ({seconds:.1f} s)", flush=True)
        save()
    if not options.keep:
        folder = (Path(options.output_path) / STEPS).resolve()
        for name in [*OUTPUTS.values(), "clean_filtered.jsonl.zst"]:
            (folder / name).unlink(missing_ok=True)
            remove_leftovers(folder / name, "partial", Path.unlink)
        with suppress(OSError):  # other files may be in it
            folder.rmdir()
    num_read, num_written = report["merge"]["counts"]["documents"], report["shuffle"]["counts"]["written"]
    return Report({"documents read": num_read, "documents in train_data.json": num_written})


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", nargs="+", default=[], metavar="FILE", help="JSON lines with text, and url if known")
    parser.add_argument(
        "--urls", metavar="DIR",
        help="folder of .txt files with one URL per line, to fetch; with --json, keep only pages of these URLs",
    )  # fmt: skip
    fetch_pages.add_limits(parser.add_argument_group("fetching pages (--urls without --json)"))
    parser.add_argument(
        "--output-path", required=True, metavar="DIR", help="folder for train_data.json and report.json"
    )
    parser.add_argument("--language", default="en", help="language to keep (en)")
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="minimum tokens of a text (128)")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, to count its tokens")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    parser.add_argument(
        "--fix-tasks", nargs="*", default=["remove_256_javascript", "general_cleaning"], metavar="TASK",
        choices=cleanup_fix_dataset.TASKS,
        help="tasks of cleanup_fix_dataset.py (remove_256_javascript general_cleaning)",
    )  # fmt: skip
    parser.add_argument("--threshold", type=float, default=0.7, metavar="X", help="similarity of duplicates (0.7)")
    parser.add_argument("--num-bands", type=int, default=20, metavar="N", help="flag of find_duplicates.py (20)")
    parser.add_argument("--num-seeds", type=int, default=100, metavar="N", help="flag of find_duplicates.py (100)")
    parser.add_argument("--lambada-path", metavar="FILE", help="remove the texts of LAMBADA")
    parser.add_argument("--task-files", nargs="*", default=[], metavar="X", help="FILE FIELD ...: texts of other tasks")
    parser.add_argument("--id-prefix", default="doc", metavar="WORD", help="prefix of the numbers (doc)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of order and fingerprints (1234)")
    parser.add_argument("--keep", action="store_true", help="keep the intermediate files")
    add_common(parser)


_INTERRUPTED = "finished steps are kept; run the command again to continue"
main = Tool("pipeline.py", __doc__, add_flags, run, interrupted=_INTERRUPTED)

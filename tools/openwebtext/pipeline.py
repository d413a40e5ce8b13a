#!/usr/bin/env python
"""A whole cleaning: from URLs or scraped pages to shuffled training data, with a report of what each step dropped.

    python tools/openwebtext/pipeline.py --urls folder_of_txt_files --output-path cleaned
    python tools/openwebtext/pipeline.py --json pages.jsonl.zst --output-path cleaned
    python tools/openwebtext/pipeline.py --json a.jsonl b.jsonl --urls folder_of_txt_files --output-path cleaned \\
        --lambada-path lambada_test.jsonl --vocab-file vocab.json --merge-file merges.txt

Steps, in this order, each but merge and shuffle a tool of this folder:

    blacklist_urls            (with --urls) URLs that may lead to a text
    fetch_pages               (with --urls and without --json) their pages' texts
    merge                     all inputs in one file; with --urls and --json, only pages of those URLs
    cleanup_dataset           encoding, English, at least 128 tokens
    cleanup_fix_dataset       the kinds of --fix-tasks
    find_duplicates, group_duplicate_url, remove_group_duplicates
    filter_ngrams             (with --lambada-path or --task-files) what evaluation tasks are made of
    shuffle, add_id           train_data.json

A step's output is there when it is complete. Called again before it has finished, or with --keep, a cleaning leaves out
the steps that are done with the same inputs and settings; fetch_pages goes on where it was interrupted. What lies
between the steps is in the folder steps. A finished cleaning removes it, fetched pages included, but nothing else
there: other settings then begin anew and fetch again. Give --keep to try several.

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

from megatron.base.atomic import holding, remove_leftovers
from megatron.base.errors import UserError
from megatron.base.text_file import parse_json
from megatron.data.cleaning.command import Report, Tool, add_common, check_apart
from megatron.data.cleaning.filtering import Judged, encode, judge_all
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
from tools.openwebtext.add_id import Numbering
from tools.openwebtext.blacklist_urls import page_of

REPORT = "report.json"

STEPS = "steps"
"""Folder of what lies between the steps, in that of the result."""

KEY = "cleaning_key"
"""Field that names a document between the steps: URLs may be missing, or repeated."""


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
"""The files that the steps write, the last one into the folder of the result."""


_PARTS = 64
"""Of a file that is shuffled."""


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: of it.
        output: the file that it writes, complete or not at all.
        settings: what its output depends on besides its inputs.
        run: does it.
        check: raises a UserError for flags that it cannot run with.
    """

    name: str
    output: Path
    settings: Sequence[Any]
    run: Callable[[], Report]
    check: Callable[[], None] = lambda: None


def merge(paths: Sequence[str | Path], urls: Path | None, output: Path, skip_bad: bool) -> Report:
    """Puts the documents of some files into one, each with a key of its own; with ``urls``, only pages of those.

    Raises:
        UserError: naming the line that is no document.
    """
    allowed = None if urls is None else {page_of(url.decode("utf-8", "replace")) for url in lines(urls)}
    numbers = count(1)

    def judge(found: dict[str, Any], line: bytes, where: str) -> Judged:
        url = found.get("url")
        if allowed is not None and not (isinstance(url, str) and page_of(url) in allowed):
            return Judged(reasons=("of URLs that are left out" if url else "without a url",))
        return Judged((encode({**found, KEY: str(next(numbers))}),))

    with writing(output) as write:
        return judge_all(judge, paths, write, keys=["text"], skip_bad=skip_bad, what="merge")


def shuffled(source: Path, seed: int) -> Iterator[bytes]:
    """The lines of a file in random order. Each goes to a random part of many; one is in memory at a time."""
    generator = random.Random(seed)
    with ExitStack() as opened:
        # Without names, so that none is left whatever ends this.
        parts = [opened.enter_context(tempfile.TemporaryFile(dir=source.parent)) for _ in range(_PARTS)]
        for line in lines(source):
            parts[generator.randrange(_PARTS)].write(line + b"\n")
        for part in parts:
            part.seek(0)
            own = part.read().split(b"\n")[:-1]
            generator.shuffle(own)
            yield from own


def shuffle_and_number(source: Path, output: Path, prefix: str, seed: int) -> Report:
    """The last step."""
    report, number = Report(written=0), Numbering(prefix)
    with writing(output) as write:
        for line in shuffled(source, seed):
            found = parse_json(line)
            del found[KEY]
            for kept in number(found, line, "").kept:
                write(kept)
                report.add("written")
    return report


def steps_of(options: argparse.Namespace) -> list[Step]:
    """The steps that the flags ask for, each reading what the one before it wrote."""
    folder = Path(os.path.abspath(options.output_path))  # so that no name begins as a flag does
    out = {name: folder / STEPS / file for name, file in OUTPUTS.items()} | {"shuffle": folder / OUTPUTS["shuffle"]}
    workers = [f"--workers={options.workers}"]
    steps: list[Step] = []

    def add(module: Any, words: Sequence[str | Path | None], free: Sequence[str] = ()) -> Path:
        """Adds a tool, whose output is None among the words; paths and free words do not change what it writes."""
        name, tool = module.__name__.rpartition(".")[2], module.main
        flags = tool.parse([*free, *(str(word or out[name]) for word in words)])
        settings = [word for word in words if isinstance(word, str)]
        steps.append(Step(name, out[name], settings, lambda: tool.run(flags), lambda: tool.check(flags)))
        return out[name]

    pages, urls = options.json, None
    if options.urls:
        urls = add(blacklist_urls, ["--", options.urls, None])
    if not pages:
        counted, free = fetch_pages.words_of(options)
        pages, urls = [add(fetch_pages, [*counted, "--", urls, None], [*free, *workers])], None
    now = out["merge"]
    steps.append(Step("merge", now, [options.json, options.urls],
                      lambda: merge(pages, urls, out["merge"], options.skip_bad_lines)))  # fmt: skip
    vocabulary = [f"--{name}-file={path}" for name, path in
                  (("vocab", options.vocab_file), ("merge", options.merge_file)) if path is not None]  # fmt: skip
    now = add(cleanup_dataset, [f"--language={options.language}", f"--min-tokens={options.min_tokens}", *vocabulary,
                                "--", now, None], workers)  # fmt: skip
    if options.fix_tasks:
        now = add(cleanup_fix_dataset, ["--input-files", now, "--output-path", now.parent,
                                        "--tasks", *options.fix_tasks], workers)  # fmt: skip
    pairs = add(find_duplicates, ["--inputs", now, KEY, "--output", None, "--heuristic-iter=-1", "--jaccard-parallel",
                                  f"--num-bands={options.num_bands}", f"--num-seeds={options.num_seeds}",
                                  f"--seed={options.seed}"], workers)  # fmt: skip
    groups = add(group_duplicate_url, ["--", pairs, None, str(options.threshold)])
    now = add(remove_group_duplicates, [f"--key={KEY}", "--", groups, now, None])
    if options.lambada_path or options.task_files:
        lambada = ["--tasks", "lambada", f"--lambada-path={options.lambada_path}"] if options.lambada_path else []
        now = add(filter_ngrams, ["--dedup-dataset", now, "text", "--output", None, *lambada,
                                  "--task-files", *options.task_files], workers)  # fmt: skip
    last = now
    steps.append(Step("shuffle", out["shuffle"], [options.seed, options.id_prefix],
                      lambda: shuffle_and_number(last, out["shuffle"], options.id_prefix, options.seed)))  # fmt: skip
    return steps


def _inputs_of(options: argparse.Namespace) -> list[Any]:
    """Names, sizes and times of the files that a cleaning begins with."""
    paths = [Path(path) for path in options.json]
    if options.urls:
        paths += [*blacklist_urls.files_of(Path(options.urls)), *sorted(blacklist_urls.LISTS.glob("*.txt"))]
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


def _report_of(path: Path) -> dict[str, dict[str, Any]]:
    """What the steps of an earlier cleaning left.

    Raises:
        UserError: when the file is another.
    """
    try:
        found: Any = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not (isinstance(found, dict) and found.keys() <= OUTPUTS.keys() and all(map(_is_entry, found.values()))):
        raise UserError(f"{path}: is no report of an earlier cleaning; remove it, or name another folder")
    return dict(found)


def _is_entry(step: Any) -> bool:
    return isinstance(step, dict) and isinstance(step.get("stamp"), str) and isinstance(step.get("counts"), dict)


def _clear(folder: Path) -> None:
    """Removes what lies between the steps, and the folder if nothing else is in it."""
    for name in [*OUTPUTS.values(), "clean_filtered.jsonl.zst"]:
        (folder / name).unlink(missing_ok=True)
        remove_leftovers(folder / name, "partial", Path.unlink)
    with suppress(OSError):
        folder.rmdir()


def run(options: argparse.Namespace) -> Report:
    """Runs all steps that are not done.

    Raises:
        UserError: for files that cannot be read or written.
    """
    if not (options.json or options.urls):
        raise UserError("--json is missing (or --urls, whose pages are then fetched)")
    folder = Path(options.output_path)
    path = folder / REPORT
    steps = steps_of(options)
    between = (folder / STEPS).resolve()
    inputs = [name for name, *_ in _inputs_of(options)]
    check_apart(inputs, [path, *(step.output for step in steps), options.report])
    for name in inputs:
        if between in Path(name).resolve().parents:
            raise UserError(f"{name}: is in the folder of what lies between the steps; move it to another")
    for step in steps:
        step.check()
    _report_of(path)
    try:
        between.mkdir(parents=True, exist_ok=True)
        with holding(folder, where_there_are_locks=True):
            return _run_steps(options, steps)
    except BlockingIOError as error:
        raise UserError(f"--output-path {folder}: another cleaning is at work there; wait for it") from error
    except OSError as error:
        raise UserError(f"--output-path {folder}: {error.strerror or error}") from error


def _run_steps(options: argparse.Namespace, steps: Sequence[Step]) -> Report:
    folder = Path(options.output_path)
    path = folder / REPORT
    done = _report_of(path)
    stamps = stamps_of(steps, options)
    matches = [done.get(step.name, {}).get("stamp") == stamp for step, stamp in zip(steps, stamps, strict=True)]
    first = len(steps)
    if not (all(matches) and steps[-1].output.exists()):
        there = [match and step.output.exists() for step, match in zip(steps, matches, strict=True)]
        first = there.index(False)
    report = {step.name: done[step.name] for step in steps[:first]}

    def save() -> None:
        with writing(path) as write:
            write(json.dumps(report, indent=1).encode())

    if first < len(steps):
        save()  # so that no step counts as done by what an earlier cleaning wrote into the files that are now replaced
    for number, (step, stamp) in enumerate(zip(steps, stamps, strict=True)):
        if number < first:
            print(f"{step.name}: done before", flush=True)
            continue
        start = time.monotonic()
        counts = step.run()
        seconds = round(time.monotonic() - start, 1)
        report[step.name] = {"stamp": stamp, "seconds": seconds, "counts": dict(counts)}
        print(f"{step.name}: {counts} ({seconds:.1f} s)", flush=True)
        save()
    if not options.keep:
        _clear((folder / STEPS).resolve())
    read, written = report["merge"]["counts"]["documents"], report["shuffle"]["counts"]["written"]
    return Report({"documents read": read, "documents in train_data.json": written})


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", nargs="+", default=[], metavar="FILE", help="JSON lines with text, and url if known")
    parser.add_argument(
        "--urls", metavar="DIR",
        help="folder of .txt files, a URL a line: their pages are fetched; with --json, only pages of theirs count",
    )  # fmt: skip
    fetch_pages.add_limits(parser.add_argument_group("fetching pages (--urls without --json)"))
    parser.add_argument("--output-path", required=True, metavar="DIR", help="for train_data.json and report.json")
    parser.add_argument("--language", default="en", help="that is kept (en)")
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="of a text that is kept (128)")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, to count its tokens")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    parser.add_argument(
        "--fix-tasks", nargs="*", default=["remove_256_javascript", "general_cleaning"], metavar="TASK",
        choices=cleanup_fix_dataset.TASKS, help="of cleanup_fix_dataset.py (remove_256_javascript general_cleaning)",
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


main = Tool("pipeline.py", __doc__, add_flags, run, interrupted="what is done is kept; the same command goes on")

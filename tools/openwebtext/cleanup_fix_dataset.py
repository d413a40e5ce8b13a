#!/usr/bin/env python
"""Drops short texts of some kinds, and repairs the other texts.

    python tools/openwebtext/cleanup_fix_dataset.py --input-files a.jsonl b.jsonl.gz --output-path cleaned \\
        --tasks remove_512_non_english remove_256_javascript ftfy_fix_text general_cleaning

For every input, writes the kept texts to a_cleaned.jsonl and the dropped texts to a_filtered.jsonl. Tasks:

    remove_512              drop texts of fewer than 512 characters
    remove_256_javascript   drop texts of fewer than 256 characters that mention javascript (pages that did not load)
    remove_512_non_english  drop texts of fewer than 512 characters that are not English
    ftfy_fix_text           repair the encoding
    general_cleaning        replace runs of spaces, and of line breaks after a word, by one space

Texts are repaired first, by all selected repairs, in this order. Memory: each process takes about 100 MB, and ten times
its longest line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.cleanup_fix_dataset")

from megatron.base.errors import UserError
from megatron.data.lines import writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import Judged, encode, judge_all
from tools.openwebtext.cleaning.language import is_language

_RUNS = re.compile(r" {2,}|(?<=\w)\n+ ?")

RULES: dict[str, Callable[[str], bool]] = {
    "remove_512": lambda text: len(text) < 512,
    "remove_256_javascript": lambda text: len(text) < 256 and "javascript" in text.lower(),
    "remove_512_non_english": lambda text: len(text) < 512 and not is_language(text, "en"),
}
"""Conditions under which a text is dropped, by task."""

TASKS = (*RULES, "ftfy_fix_text", "general_cleaning")


@dataclass(frozen=True)
class Fix:
    """Judge that repairs a document's text, and drops it if a rule applies; ``key`` is the field of the text."""

    key: str
    tasks: tuple[str, ...]

    def repair(self, text: str) -> str:
        """Apply the selected repairs to a text."""
        if "ftfy_fix_text" in self.tasks:
            import ftfy

            text = ftfy.fix_text(text)
        return _RUNS.sub(" ", text) if "general_cleaning" in self.tasks else text

    def __call__(self, row: dict[str, Any], line: bytes, where: str) -> Judged:
        text = self.repair(row[self.key])
        fixed = ("fixed",) if text != row[self.key] else ()
        reason = next((name for name, drops in RULES.items() if name in self.tasks and drops(text)), None)
        if reason is not None:
            return Judged(dropped=line, reasons=(*fixed, reason))
        return Judged((encode({**row, self.key: text}) if fixed else line,), reasons=fixed)


def output_paths(path: Path, folder: Path) -> tuple[Path, Path]:
    """Paths for the kept and the dropped documents of a file: its name with a suffix before all extensions."""
    packed = path.suffix if path.suffix in (".gz", ".zst") else ""
    plain = Path(path.name.removesuffix(packed))
    ends = plain.suffix + packed
    return folder / f"{plain.stem}_cleaned{ends}", folder / f"{plain.stem}_filtered{ends}"


def run(options: argparse.Namespace) -> Report:
    """Clean files.

    Raises:
        UserError: for files that cannot be read or written.
    """
    folder = Path(options.output_path)
    outputs = [output_paths(Path(path), folder) for path in options.input_files]
    if len(set(outputs)) < len(outputs):
        raise UserError("--input-files: two files would have the same output; rename one of them")
    check_apart(options.input_files, [*(path for pair in outputs for path in pair), options.report])
    for path in options.input_files:
        if not Path(path).exists():
            raise UserError(f"{path}: No such file or directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-path {folder}: {error.strerror}; name a writable folder") from error
    report = Report()
    fix = Fix(options.key, tuple(options.tasks))
    settings: dict[str, Any] = {"workers": options.workers, "skip_bad": options.skip_bad_lines}
    for path, (cleaned, filtered) in zip(options.input_files, outputs, strict=True):
        with writing(cleaned) as keep, writing(filtered) as drop:
            report.update(judge_all(fix, [path], keep, drop, keys=[options.key], label=Path(path).name, **settings))
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-files", nargs="+", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--tasks", nargs="+", required=True, choices=TASKS, metavar="TASK", help="see above")
    parser.add_argument(
        "--output-path", required=True, metavar="DIR", help="folder of the outputs; created if it is missing"
    )
    parser.add_argument("--key", default="text", help="field that holds the text (text)")
    parser.add_argument("--log-interval", type=int, default=100, metavar="N", help="has no effect: there is a bar")
    add_common(parser)


main = Tool("cleanup_fix_dataset.py", __doc__, add_flags, run, interrupted="the outputs of finished inputs are kept")

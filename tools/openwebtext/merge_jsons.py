#!/usr/bin/env python
"""Puts all JSON files of a folder into one, line after line.

    python tools/openwebtext/merge_jsons.py --json_path cleaned --output_file merged_output.json

Reads *.json and *.jsonl, compressed or not, in the order of their names, but for the *_filtered files of
cleanup_fix_dataset.py. Lines are checked to be JSON objects.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.merge_jsons")

from megatron.base.errors import UserError
from megatron.data.cleaning.command import Report, Tool, add_common, check_apart
from megatron.data.cleaning.filtering import Judged, judge_all
from megatron.data.lines import writing


def keep(found: dict[str, Any], line: bytes, where: str) -> Judged:
    """Every document stays as it is."""
    return Judged((line,))


def run(options: argparse.Namespace) -> Report:
    """Merges the files of a folder.

    Raises:
        UserError: when there are none, or one is no JSON lines.
    """
    output = Path(options.output_file).resolve()
    pattern = re.compile(r".+\.jsonl?(\.gz|\.zst)?")
    folder = Path(options.json_path)
    files = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)) if folder.is_dir() else []
    files = [path for path in files if path.resolve() != output and not path.name.startswith(".")]
    files = [path for path in files if not path.name.split(".json")[0].endswith("_filtered")]
    if not files:
        raise UserError(f"--json_path {folder}: holds no .json or .jsonl files")
    check_apart(files, [options.output_file, options.report])
    report = Report(files=len(files))
    with writing(options.output_file) as write:
        return judge_all(keep, files, write, skip_bad=options.skip_bad_lines, report=report)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json_path", "--json-path", default=".", metavar="DIR", help="folder (this one)")
    parser.add_argument(
        "--output_file", "--output-file", default="merged_output.json", metavar="FILE", help="(merged_output.json)"
    )
    add_common(parser, workers=False)


main = Tool("merge_jsons.py", __doc__, add_flags, run)

#!/usr/bin/env python
"""Merges all JSON-lines files of a folder.

    python tools/openwebtext/merge_jsons.py --json_path cleaned --output_file merged_output.json

Reads *.json and *.jsonl, compressed or not, in the order of their names, except the *_filtered files of
cleanup_fix_dataset.py. Every line must be a JSON object.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.merge_jsons")

from megatron.base.errors import UserError
from megatron.data.lines import writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import Judged, judge_all


def run(options: argparse.Namespace) -> Report:
    """Merge the files of a folder.

    Raises:
        UserError: when there are none, or a line is not a JSON object.
    """
    output = Path(options.output_file).resolve()
    pattern = re.compile(r"[^.].*(?<!_filtered)\.jsonl?(\.gz|\.zst)?")
    folder = Path(options.json_path)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [path for path in paths if pattern.fullmatch(path.name) and path.resolve() != output]
    if not files:
        raise UserError(f"--json_path {folder}: holds no .json or .jsonl files")
    check_apart(files, [options.output_file, options.report])
    with writing(options.output_file) as write:
        counts = judge_all(lambda row, line, where: Judged((line,)), files, write, skip_bad=options.skip_bad_lines)
    return Report({"files": len(files), **counts})


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json_path", "--json-path", default=".", metavar="DIR", help="folder (the current folder)")
    parser.add_argument(
        "--output_file",
        "--output-file",
        default="merged_output.json",
        metavar="FILE",
        help="output (merged_output.json)",
    )
    add_common(parser, workers=False)


main = Tool("merge_jsons.py", __doc__, add_flags, run)

#!/usr/bin/env python
"""Keeps one document of each group of duplicates.

    python tools/openwebtext/remove_group_duplicates.py groups.jsonl data.jsonl deduplicated.jsonl

Reads the output of group_duplicate_url.py, and keeps the first document of each group. Names should be unique: of
documents with the same name, find_duplicates.py compared the first, and the others stay. Memory: the names of the
removed documents.
"""

from __future__ import annotations

import argparse
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.remove_group_duplicates")

from megatron.base.errors import UserError
from megatron.data.lines import numbered_lines, writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import Judged, document, judge_all


def run(options: argparse.Namespace) -> Report:
    """Remove the duplicates of a file.

    Raises:
        UserError: naming the line that is not a group.
    """
    check_apart([options.groups, options.data], [options.output, options.report])
    duplicates, removed = set[str](), set[str]()
    for number, line in numbered_lines(options.groups):
        where = f"{options.groups}, line {number}"
        for names in document(line, where, skippable=False).values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise UserError(f"{where}: is not a line of group_duplicate_url.py's output")
            duplicates.update(names[1:])

    def judge(row: dict[str, Any], line: bytes, where: str) -> Judged:
        name = row[options.key]
        if name in removed:
            return Judged((line,), reasons=("that repeat a duplicate's name and stay",))
        if name not in duplicates:
            return Judged((line,))
        removed.add(name)
        return Judged(reasons=("duplicates",))

    with writing(options.output) as write:
        return judge_all(judge, [options.data], write, keys=[options.key], skip_bad=options.skip_bad_lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("groups", help="output of group_duplicate_url.py")
    parser.add_argument("data", help="JSON lines")
    parser.add_argument("output", help="JSON lines")
    parser.add_argument("--key", default="url", help="field that names a document (url)")
    add_common(parser, workers=False)


main = Tool("remove_group_duplicates.py", __doc__, add_flags, run)

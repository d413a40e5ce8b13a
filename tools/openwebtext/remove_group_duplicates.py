#!/usr/bin/env python
"""Keeps one document of each group of duplicates.

    python tools/openwebtext/remove_group_duplicates.py groups.jsonl data.jsonl deduplicated.jsonl

Reads what group_duplicate_url.py wrote; of each group the document named first is kept. Names should be unique: of
documents with one name, find_duplicates.py has compared the first, and the others stay. Memory: the names that are left
out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.base.errors import UserError
from tools.openwebtext.streams import (
    Report,
    add_common,
    check_apart,
    command,
    document,
    documents,
    numbered_lines,
    writing,
)  # fmt: skip


def run(options: argparse.Namespace) -> Report:
    """Removes the duplicates of a file.

    Raises:
        UserError: naming the line that is no group or no document.
    """
    check_apart([options.groups, options.data], [options.output, options.report])
    gone: set[str] = set()
    met: set[str] = set()
    for number, line in numbered_lines(options.groups):
        where = f"{options.groups}, line {number}"
        for names in document(line, where, skippable=False).values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise UserError(f"{where}: is no line of group_duplicate_url.py's output")
            gone.update(names[1:])
    report = Report()
    report.add("documents", 0)
    with writing(options.output) as write:
        for line, found in documents(options.data, report, options.skip_bad_lines, options.key):
            name = found[options.key]
            if name in gone:
                gone.remove(name)
                met.add(name)
                report.add("duplicates")
                continue
            if name in met:
                report.add("that repeat a duplicate's name and stay")
            write(line)
            report.add("written")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="remove_group_duplicates.py", description=__doc__)
    parser.add_argument("groups", help="output of group_duplicate_url.py")
    parser.add_argument("data", help="JSON lines")
    parser.add_argument("output", help="JSON lines")
    parser.add_argument("--key", default="url", help="field that names a document (url)")
    add_common(parser, workers=False)
    return command(parser, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python
"""Keeps one document of each group of duplicates.

    python tools/openwebtext/remove_group_duplicates.py groups.jsonl data.jsonl deduplicated.jsonl

Reads what group_duplicate_url.py wrote; of each group the document named first is kept. Documents of one name go
together, so names should be unique.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.config.errors import UserError
from tools.openwebtext.streams import Report, add_common, command, document, lines, progress, text_of, writing


def run(options: argparse.Namespace) -> Report:
    """Removes the duplicates of a file.

    Raises:
        UserError: naming the line that is no group or no document.
    """
    gone: set[str] = set()
    for number, line in enumerate(lines(options.groups), 1):
        where = f"{options.groups}, line {number}"
        for names in document(line, where).values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise UserError(f"{where}: is no line of group_duplicate_url.py's output")
            gone.update(names[1:])
    report = Report()
    report.add("documents", 0)
    with writing(options.output) as write:
        for number, line in enumerate(progress(lines(options.data), "documents"), 1):
            report.add("documents")
            where = f"{options.data}, line {number}"
            try:
                key = text_of(document(line, where), options.key, where)
            except UserError:
                if not options.skip_bad_lines:
                    raise
                report.add("bad lines skipped")
                continue
            if key in gone:
                report.add("duplicates")
                continue
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

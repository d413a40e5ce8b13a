#!/usr/bin/env python
"""Numbers the documents: each gets a field adlr_id.

python tools/openwebtext/add_id.py --input-file data.jsonl --output-file numbered.jsonl --id-prefix owt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.openwebtext.streams import Report, add_common, check_apart, command, documents, encode, writing


def numbered(found: dict[str, Any], prefix: str, number: int) -> bytes:
    """The line of a document with its number, the first of which is 1."""
    return encode({**found, "adlr_id": f"{prefix}-{number:010d}"})


def run(options: argparse.Namespace) -> Report:
    """Numbers the documents of a file.

    Raises:
        UserError: naming the line that is no document.
    """
    check_apart([options.input_file], [options.output_file, options.report])
    report = Report()
    report.add("written", 0)
    with writing(options.output_file) as write:
        for _, found in documents(options.input_file, report, options.skip_bad_lines):
            report.add("written")
            write(numbered(found, options.id_prefix, report.counts["written"]))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="add_id.py", description=__doc__)
    parser.add_argument("--input-file", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--output-file", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--id-prefix", required=True, metavar="WORD", help="that the numbers begin with")
    parser.add_argument("--log-interval", type=int, default=100, metavar="N", help="has no effect: there is a bar")
    add_common(parser, workers=False)
    return command(parser, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

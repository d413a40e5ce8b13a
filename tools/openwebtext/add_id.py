#!/usr/bin/env python
"""Numbers the documents: each gets a field adlr_id.

python tools/openwebtext/add_id.py --input-file data.jsonl --output-file numbered.jsonl --id-prefix owt
"""

from __future__ import annotations

import argparse
from itertools import count

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.add_id")

from megatron.data.lines import writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import Judge, Judged, encode, judge_all


def numbering(prefix: str) -> Judge:
    """Make a judge that numbers the documents from 1."""
    numbers = count(1)
    return lambda row, *_: Judged((encode({**row, "adlr_id": f"{prefix}-{next(numbers):010d}"}),))


def run(options: argparse.Namespace) -> Report:
    """Number the documents of a file."""
    check_apart([options.input_file], [options.output_file, options.report])
    with writing(options.output_file) as write:
        return judge_all(numbering(options.id_prefix), [options.input_file], write, skip_bad=options.skip_bad_lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-file", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--output-file", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--id-prefix", required=True, metavar="WORD", help="prefix of the numbers")
    parser.add_argument("--log-interval", type=int, default=100, metavar="N", help="has no effect: there is a bar")
    add_common(parser, workers=False)


main = Tool("add_id.py", __doc__, add_flags, run)

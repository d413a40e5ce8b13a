#!/usr/bin/env python
"""Downloads OpenWebText, or another data set, as JSON lines.

    python tools/openwebtext/download_openwebtext.py --output openwebtext.jsonl.zst
    python tools/openwebtext/download_openwebtext.py --dataset name_or_folder --output data.jsonl --limit 1000

Streams with Hugging Face's datasets, so memory and disk hold nothing but the output. A row without a url gets one made
of the data set's name and the row's number, since the other tools name documents by their URLs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.download_openwebtext")

from megatron.base.errors import UserError, first_line
from megatron.data.lines import writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_at_least, progress
from tools.openwebtext.cleaning.filtering import encode


def rows(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Rows of the data set."""
    from datasets import load_dataset

    try:
        yield from load_dataset(options.dataset, split=options.split, streaming=True)
    except Exception as error:  # network, file or name errors: each library raises other types
        raise UserError(f"--dataset {options.dataset} --split {options.split}: {first_line(error)}") from error


def _as_text(value: object) -> str:
    if isinstance(value, (dt.date, dt.time, dt.timedelta, decimal.Decimal)):
        return str(value)
    raise TypeError(f"values of type {type(value).__name__}")


def line_of(row: dict[str, Any]) -> bytes:
    """Encode a row as JSON; dates and decimal numbers become text.

    Raises:
        UserError: naming a column that has no such form.
    """
    try:
        return encode(row, _as_text)
    except TypeError:
        for column, value in row.items():
            try:
                encode({column: value}, _as_text)
            except TypeError as error:
                raise UserError(f"column {column!r} cannot be written as JSON: {error}") from error
        raise


def check(options: argparse.Namespace) -> None:
    """Check that nothing is written into a data set of this machine, or over one of its files."""
    check_at_least(options, limit=1)
    if not os.path.exists(options.dataset):
        return
    folder = Path(os.path.realpath(options.dataset))
    read_paths = {os.path.realpath(path) for path in folder.rglob("*")}  # links may lead elsewhere
    for flag, path in (("--output", options.output), ("--report", options.report)):
        target = Path(os.path.realpath(path)) if path is not None else None
        if target is not None and (folder in (target, *target.parents) or str(target) in read_paths):
            raise UserError(f"{flag} {path}: is in --dataset {options.dataset}, which is read; name a file elsewhere")


def run(options: argparse.Namespace) -> Report:
    """Write the data set."""
    report = Report(written=0)
    with writing(options.output) as write:
        for number, row in enumerate(progress(islice(rows(options), options.limit), "rows", "row")):
            if row.get("url") is None:
                row["url"] = f"{Path(options.dataset).name}/{options.split}/{number}"
            write(line_of(row))
            report["written"] += 1
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument(
        "--dataset", default="Skylion007/openwebtext", metavar="NAME", help="name or folder (OpenWebText)"
    )
    parser.add_argument("--split", default="train", metavar="NAME", help="split of the data set (train)")
    parser.add_argument("--limit", type=int, metavar="N", help="maximum number of rows (all)")
    add_common(parser, workers=False, bad_lines=False)


main = Tool("download_openwebtext.py", __doc__, add_flags, run, check)

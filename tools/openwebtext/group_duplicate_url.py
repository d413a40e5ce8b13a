#!/usr/bin/env python
"""Groups documents that are linked by high similarities.

    python tools/openwebtext/group_duplicate_url.py duplicates.jsonl groups.jsonl 0.7

Reads the output of find_duplicates.py and writes {"0": [URL, URL, ...]}, one line for each group of two or more. Two
documents are in the same group if a chain of similarities of at least the threshold connects them. Members are in the
order of their first occurrence. find_duplicates.py writes only similarities above 0.5, so lower thresholds link no
more. Memory: the linked names.
"""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.group_duplicate_url")

from megatron.base.errors import UserError
from megatron.data.lines import writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart
from tools.openwebtext.cleaning.filtering import BAD_LINE, apply_to_lines, encode, split_file


def pairs_of(row: dict[str, Any], line: bytes, where: str) -> list[tuple[str, str, float]]:
    """Pairs of names and their similarities in a line of find_duplicates.py's output."""
    try:
        pairs = [(name, *pair) for name, others in row.items() for other in others for pair in other.items()]
        if all(type(value) in (int, float) and 0 <= value <= 1 for _, _, value in pairs):
            return pairs
    except (AttributeError, TypeError):
        pass
    raise UserError(f"{where}: is not a line of find_duplicates.py's output")


def check(options: argparse.Namespace) -> None:
    """Check the flags."""
    if not 0 <= options.threshold <= 1:
        raise UserError(f"threshold {options.threshold:g}: give a similarity from 0 to 1")
    check_apart([options.input], [options.output, options.report])


def run(options: argparse.Namespace) -> Report:
    """Group the pairs of a file."""
    from networkx.utils import UnionFind

    links, report = UnionFind(), Report(pairs=0)
    for part in split_file(options.input):
        lines_of_pairs, num_bad = apply_to_lines(pairs_of, part, options.skip_bad_lines)
        if num_bad:
            report[BAD_LINE] += num_bad
        for name, other, value in chain.from_iterable(lines_of_pairs):
            report["pairs"] += 1
            if value >= options.threshold:
                links.union(name, other)
    groups: dict[str, list[str]] = {}
    for name in links:  # in order of first occurrence
        groups.setdefault(links[name], []).append(name)
    with writing(options.output) as write:
        for number, names in enumerate(names for names in groups.values() if len(names) > 1):
            write(encode({str(number): names}))
            report["groups"] += 1
            report["documents in groups"] += len(names)
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="output of find_duplicates.py")
    parser.add_argument("output", help="file for the groups")
    parser.add_argument("threshold", nargs="?", type=float, default=0.7, help="minimum similarity of a link (0.7)")
    add_common(parser, workers=False)


main = Tool("group_duplicate_url.py", __doc__, add_flags, run, check)

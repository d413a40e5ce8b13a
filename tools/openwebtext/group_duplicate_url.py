#!/usr/bin/env python
"""Puts documents that are linked by high similarities into groups.

    python tools/openwebtext/group_duplicate_url.py duplicates.jsonl groups.jsonl 0.7

Reads what find_duplicates.py wrote and writes {"0": [URL, URL, ...]}, one line for each group of two or more; two
documents are in one group when a chain of similarities of at least the threshold connects them. Members are in the
order in which they were met. find_duplicates.py writes similarities above 0.5, so that lower thresholds link no more.
Memory: the names that are linked.
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
    BAD_LINE,
    Report,
    add_common,
    check_apart,
    command,
    document,
    encode,
    numbered_lines,
    writing,
)  # fmt: skip


class Groups:
    """Disjoint sets of names (Tarjan 1975)."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._parents: list[int] = []

    def number(self, name: str) -> int:
        """Of a name; new ones are sets of their own."""
        if name not in self.numbers:
            self.numbers[name] = len(self._parents)
            self._parents.append(len(self._parents))
        return self.numbers[name]

    def _root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def join(self, a: str, b: str) -> None:
        """Makes one set of theirs; the name that was met first stands for it."""
        first, second = sorted((self._root(self.number(a)), self._root(self.number(b))))
        self._parents[second] = first

    def sets(self) -> list[list[str]]:
        """Those of two or more."""
        found: dict[int, list[str]] = {}
        for name, number in self.numbers.items():
            found.setdefault(self._root(number), []).append(name)
        return [names for names in found.values() if len(names) > 1]


def _pairs_of(line: bytes, where: str) -> list[tuple[str, str, float]]:
    """Two names and their similarity each."""
    found = document(line, where)
    try:
        pairs = [(name, *pair) for name, others in found.items() for other in others for pair in other.items()]
        if all(type(value) in (int, float) and 0 <= value <= 1 for _, _, value in pairs):
            return pairs
    except (AttributeError, TypeError):
        pass
    raise UserError(f"{where}: is no line of find_duplicates.py's output")


def check(options: argparse.Namespace) -> None:
    """Checks the flags.

    Raises:
        UserError: when they make no sense.
    """
    if not 0 <= options.threshold <= 1:
        raise UserError(f"threshold {options.threshold:g}: give a similarity from 0 to 1")
    check_apart([options.input], [options.output, options.report])


def run(options: argparse.Namespace) -> Report:
    """Groups the pairs of a file.

    Raises:
        UserError: naming the line that is none of find_duplicates.py's.
    """
    check(options)
    groups, report = Groups(), Report()
    report.add("pairs", 0)
    for number, line in numbered_lines(options.input):
        try:
            pairs = _pairs_of(line, f"{options.input}, line {number}")
        except UserError:
            if not options.skip_bad_lines:
                raise
            report.add(BAD_LINE)
            continue
        report.add("pairs", len(pairs))
        for name, other, value in pairs:
            if value >= options.threshold:
                groups.join(name, other)
    with writing(options.output) as write:
        for number, names in enumerate(groups.sets()):
            write(encode({str(number): names}))
            report.add("groups")
            report.add("documents in groups", len(names))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="group_duplicate_url.py", description=__doc__)
    parser.add_argument("input", help="output of find_duplicates.py")
    parser.add_argument("output", help="for the groups")
    parser.add_argument(
        "threshold",
        nargs="?",
        type=float,
        default=0.7,
        help="similarity that links (0.7)",
    )
    add_common(parser, workers=False)
    return command(parser, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())

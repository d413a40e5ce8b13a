"""What all cleaning tools have in common: flags, checks before the work, counts, and what is said at the end."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from megatron.base.errors import UserError
from megatron.data.interrupt import run_command
from megatron.data.lines import check_output, writing

T = TypeVar("T")

_WRITTEN = ("output", "output_file", "save_fingerprints", "save_dictionary", "report")
"""Flags that name a file to be written, of whichever tool."""


class Report(Counter[str]):
    """What a step did: counts, in the order in which they were first seen."""

    def add(self, what: str, count: int = 1) -> None:
        self[what] += count

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in self.items())


def progress(items: Iterable[T], what: str, unit: str = "document") -> Any:
    """The items, with a bar on a terminal and a line now and then elsewhere."""
    return tqdm(items, unit=unit, desc=what, mininterval=1.0 if sys.stderr.isatty() else 30.0)


def add_common(parser: argparse.ArgumentParser, *, workers: bool = True, bad_lines: bool = True) -> None:
    """Flags that most tools have."""
    if workers:
        default = len(os.sched_getaffinity(0))
        parser.add_argument(
            "--workers", type=int, default=default, metavar="N", help=f"processes ({default}: all cores)"
        )
    if bad_lines:
        parser.add_argument(
            "--skip-bad-lines", action="store_true", help="count lines that are no documents, and go on"
        )
    parser.add_argument("--report", metavar="FILE", help="write the counts there as JSON")


def check_at_least(options: argparse.Namespace, **least: int) -> None:
    """Checks flags that are numbers.

    Args:
        options: the flags.
        least: of each, by its name.

    Raises:
        UserError: naming the first that is less.
    """
    for name, most in least.items():
        if (value := getattr(options, name)) is not None and value < most:
            raise UserError(f"--{name.replace('_', '-')} {value}: give at least {most}")


def check_apart(inputs: Iterable[str | Path | None], outputs: Iterable[str | Path | None]) -> None:
    """Checks that nothing that is read is written, and nothing is written twice; None stands for a file not named.

    Raises:
        UserError: naming what is.
    """
    read = {os.path.realpath(path) for path in inputs if path is not None}
    written: set[str] = set()
    for path in outputs:
        if path is None:
            continue
        place = os.path.realpath(path)
        if place in read:
            raise UserError(f"{path} would be read and overwritten; name another folder, or another file")
        if place in written:
            raise UserError(f"{path} would be written twice; name another file")
        written.add(place)


def _check_common(options: argparse.Namespace) -> None:
    """Checks, before any work, what all tools have: numbers of processes, and the files that they write."""
    most = 4 * len(os.sched_getaffinity(0))
    for name in {"workers", "num_threads"} & vars(options).keys():
        check_at_least(options, **{name: 1})
        if (value := getattr(options, name)) > most:
            raise UserError(f"--{name.replace('_', '-')} {value}: give at most {most}, four for each core")
    written = [getattr(options, flag) for flag in _WRITTEN if getattr(options, flag, None) is not None]
    check_apart([], written)
    made = getattr(options, "output_path", None)  # the cleaning makes its folder itself
    for path in written:
        if made is None or Path(made).exists() or Path(path).parent != Path(made):
            check_output(path)


@dataclass
class Tool:
    """A command: called with its words, it ends with 0 and its counts, or with 2 and one line.

    Args:
        name: of its file.
        about: what ``--help`` says of it.
        add_flags: adds its flags to a parser.
        run: does the work that the flags ask for.
        check: raises a UserError for flags that make no sense, before any work.
        interrupted: what has become of its work when the user stops it.
    """

    name: str
    about: str | None
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]
    check: Callable[[argparse.Namespace], None] = field(default=lambda options: None)
    interrupted: str = "no unfinished file is left"

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """The flags that some words (default: those of this process) give."""
        parser = argparse.ArgumentParser(
            prog=self.name, description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.add_flags(parser)
        return parser.parse_args(words)

    def __call__(self, words: Sequence[str] | None = None) -> int:
        options = self.parse(words)
        name = self.name.removesuffix(".py")
        return run_command(lambda: self._report(options, name), name, self.interrupted)

    def _report(self, options: argparse.Namespace, name: str) -> None:
        try:
            _check_common(options)
            self.check(options)
            report = self.run(options)
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is missing: pip install -e '.[cleaning]'") from error
        if getattr(options, "report", None) is not None:
            with writing(options.report) as write:
                write(json.dumps(report, indent=1).encode())
        print(f"{name}: {report}")

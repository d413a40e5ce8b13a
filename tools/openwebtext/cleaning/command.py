"""Common parts of the cleaning tools: flags, checks before the work, counts, and the last line."""

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
from megatron.base.user_text import flag_of
from megatron.data.interrupt import run_command
from megatron.data.lines import check_output, writing

T = TypeVar("T")

_WRITTEN = ("output", "output_file", "save_fingerprints", "save_dictionary", "report")
"""Flags of all tools that name an output file."""


class Report(Counter[str]):
    """Counts of a cleaning step, in order of first occurrence."""

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in self.items())


def progress(items: Iterable[T], label: str, unit: str = "document") -> Any:
    """Wrap items in a progress bar, which prints a line every 30 s if there is no terminal."""
    return tqdm(items, unit=unit, desc=label, mininterval=1.0 if sys.stderr.isatty() else 30.0)


def add_common(parser: argparse.ArgumentParser, *, workers: bool = True, bad_lines: bool = True) -> None:
    """Add flags that most tools have."""
    if workers:
        default = len(os.sched_getaffinity(0))
        parser.add_argument(
            "--workers", type=int, default=default, metavar="N", help=f"processes ({default}: all cores)"
        )
    if bad_lines:
        parser.add_argument("--skip-bad-lines", action="store_true", help="skip and count lines that are not documents")
    parser.add_argument("--report", metavar="FILE", help="write the counts to this file as JSON")


def check_at_least(options: argparse.Namespace, **minimums: int) -> None:
    """Check minimum values of numeric flags, given by name.

    Raises:
        UserError: naming the first flag below its minimum.
    """
    for name, minimum in minimums.items():
        if (value := getattr(options, name)) is not None and value < minimum:
            raise UserError(f"{flag_of(name)} {value}: give at least {minimum}")


def check_apart(inputs: Iterable[str | Path | None], outputs: Iterable[str | Path | None]) -> None:
    """Check that no output is also an input, and that outputs are distinct; None is a file that was not specified.

    Raises:
        UserError: naming the first conflict.
    """
    input_paths = {os.path.realpath(path) for path in inputs if path is not None}
    output_paths: set[str] = set()
    for path in outputs:
        if path is None:
            continue
        real_path = os.path.realpath(path)
        if real_path in input_paths:
            raise UserError(f"{path} would be read and overwritten; name another folder, or another file")
        if real_path in output_paths:
            raise UserError(f"{path} would be written twice; name another file")
        output_paths.add(real_path)


@dataclass
class Tool:
    """A command-line tool: prints its counts and returns 0, or prints a single-line error and returns 2.

    Args:
        name: file name of the tool.
        about: description for ``--help``.
        add_flags: adds the tool's flags to a parser.
        run: does the work.
        check: raises a UserError for invalid flags, before any work.
        interrupted: state of the output after an interrupt, for the message.
    """

    name: str
    about: str | None
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]
    check: Callable[[argparse.Namespace], None] = field(default=lambda options: None)
    interrupted: str = "no unfinished file is left"

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Parse command-line arguments (default: ``sys.argv``)."""
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
            max_workers = 4 * len(os.sched_getaffinity(0))
            for flag in {"workers", "num_threads"} & vars(options).keys():
                check_at_least(options, **{flag: 1})
                if (value := getattr(options, flag)) > max_workers:
                    raise UserError(f"{flag_of(flag)} {value}: give at most {max_workers}, four for each core")
            output_paths = [getattr(options, flag) for flag in _WRITTEN if getattr(options, flag, None) is not None]
            check_apart([], output_paths)
            output_folder = getattr(options, "output_path", None)  # created by the cleaning run itself
            for path in output_paths:
                if output_folder is None or Path(output_folder).exists() or Path(path).parent != Path(output_folder):
                    check_output(path)
            self.check(options)
            report = self.run(options)
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is missing: pip install -e '.[cleaning]'") from error
        if getattr(options, "report", None) is not None:
            with writing(options.report) as write:
                write(json.dumps(report, indent=1).encode())
        print(f"{name}: {report}")

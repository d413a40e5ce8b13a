"""Measurements: training, kernels, memory, slow networks, and the cost of compressors in loss."""

import argparse
from collections.abc import Collection, Iterable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
"""Folder of the repository."""


def join_for_help(names: Iterable[str], separator: str = ",") -> str:
    """Names for argparse's help texts, in which "%" is written twice."""
    return f"{separator} ".join(names).replace("%", "%%")


def parse_names(
    parser: argparse.ArgumentParser, flag: str, text: str | None, choices: Collection[str], separator: str = ","
) -> list[str]:
    """Return the names in a flag's value, or all choices without a value; an unknown name ends the program."""
    names = [name.strip() for name in text.split(separator)] if text else list(choices)
    for name in names:
        if name not in choices:
            parser.error(f"{flag} {name}: choose from {f'{separator} '.join(choices)}")
    return names

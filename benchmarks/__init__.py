"""Measurements: training, kernels, memory, networks of other rates, and what compressors do to losses."""

import argparse
from collections.abc import Collection, Iterable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
"""Whose programs are measured, and where documents and pictures lie."""


def listed(names: Iterable[str], separator: str = ",") -> str:
    """Names as argparse's help texts take them: a "%" in a help text is written twice."""
    return f"{separator} ".join(names).replace("%", "%%")


def chosen(
    parser: argparse.ArgumentParser, flag: str, text: str | None, known: Collection[str], separator: str = ","
) -> list[str]:
    """The names that a flag gives, all that are known where it is not given; ends the program at any other name."""
    names = [name.strip() for name in text.split(separator)] if text else list(known)
    for name in names:
        if name not in known:
            parser.error(f"{flag} {name}: choose from {f'{separator} '.join(known)}")
    return names

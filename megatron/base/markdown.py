"""Tables in Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from megatron.base.errors import UserError


def markdown_row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def markdown_head(titles: Sequence[str]) -> str:
    """Header and separator rows of a table."""
    return f"{markdown_row(titles)}\n{markdown_row(['---'] * len(titles))}"


def markdown_table(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table, without a trailing line break."""
    return "\n".join([markdown_head(titles), *map(markdown_row, rows)])


def table_after(text: str, mark: str = "", head: str = "|") -> list[dict[str, str]]:
    """Rows of the first table after a mark in a text, as mappings from column titles to cells.

    Args:
        text: the text.
        mark: text before the table.
        head: beginning of the table's first line.

    Raises:
        UserError: when there is no mark, or no such table after it.
    """
    position = text.find(mark)
    lines = text[position + len(mark) :].splitlines() if position >= 0 else []
    start = next((number for number, line in enumerate(lines) if line.startswith(head)), None)
    if start is None:
        raise UserError(
            f"no table after {mark!r}; write where it went" if mark else f"no table that begins with {head}"
        )
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    titles, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in table)
    return [dict(zip(titles, row, strict=True)) for row in rows]

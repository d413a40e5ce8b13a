"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def markdown_head(titles: Sequence[str]) -> str:
    """Header and separator rows of a table."""
    return f"{markdown_row(titles)}\n{markdown_row(['---'] * len(titles))}"


def markdown_table(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table, without a trailing line break."""
    return "\n".join([markdown_head(titles), *map(markdown_row, rows)])

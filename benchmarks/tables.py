"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.base.markdown import markdown_head, markdown_row

Cells = Mapping[str, Any]
"""A measurement, by the names of its figures."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        title: its title.
        value: name of the figure that it shows, or a function of the measurement.
        form: format of the value.
    """

    title: str
    value: str | Callable[[Cells], Any]
    form: str = ""

    def of(self, cells: Cells) -> Any:
        """The value of a measurement; None where it has none."""
        return cells.get(self.value) if isinstance(self.value, str) else self.value(cells)

    def text(self, cells: Cells) -> str:
        """The text of a cell; empty where there is no value."""
        value = self.of(cells)
        return "" if value is None else format(value, self.form)


class Table:
    """A table with a line for each measurement, which can be shown line by line."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def head(self) -> str:
        """The first two lines."""
        return markdown_head([column.title for column in self.columns])

    def line(self, cells: Cells) -> str:
        """The line of a measurement."""
        return markdown_row(column.text(cells) for column in self.columns)

    def text(self, rows: Iterable[Cells]) -> str:
        """The whole table."""
        return "\n".join([self.head(), *map(self.line, rows)])

    def filled(self, rows: Iterable[Cells]) -> Table:
        """The table of the columns that some measurement has a value for."""
        rows = list(rows)
        return Table(*(column for column in self.columns if any(column.of(cells) is not None for cells in rows)))

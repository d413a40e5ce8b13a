"""Sides that take turns, the tables of what they took, and the record of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import header, write_record
from benchmarks.tables import Column, Table
from benchmarks.turns import in_turns


def test_sides_take_turns_and_are_compared_turn_by_turn() -> None:
    """The first turn of each does not count; the ratio is the median of ratios, not the ratio of medians."""
    calls: list[str] = []

    def side(name: str, *seconds: float) -> Callable[[], float]:
        left = iter(seconds)

        def turn() -> float:
            calls.append(name)
            return next(left)

        return turn

    taken = in_turns(side("ours", 9.0, 1.0, 2.0, 10.0), side("theirs", 9.0, 3.0, 20.0, 15.0), turns=3, warm=1)
    assert calls == ["ours", "theirs"] * 4
    assert taken.seconds == ((1.0, 2.0, 10.0), (3.0, 20.0, 15.0))
    assert (taken.median(), taken.median(1), taken.best(1)) == (2.0, 15.0, 3.0)
    assert taken.ratio() == 3.0


def test_a_table_shows_its_rows() -> None:
    table = Table(
        Column("side", "name"),
        Column("s", "seconds", ".2f"),
        Column("x", lambda row: f"{row['seconds'] / 2:.1f} x"),
        Column("loss", "loss"),
    )
    rows: list[dict[str, object]] = [{"name": "a|b", "seconds": 1.0}, {"name": "c", "seconds": 2.0, "loss": None}]
    text = table.filled(rows).text(rows)
    assert text == "| side | s | x |\n| --- | --- | --- |\n| a\\|b | 1.00 | 0.5 x |\n| c | 2.00 | 1.0 x |"
    assert table.line(rows[1]) == "| c | 2.00 | 1.0 x |  |"


def test_a_record_says_what_it_was_made_with(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write_record(path, header("a GPU"), rows=[1, 2])
    record = json.loads(path.read_text())
    assert record["rows"] == [1, 2]
    assert record["header"]["device"] == "a GPU"
    assert all(record["header"][name] for name in ("cpus", "torch", "cuda", "driver", "date", "commit", "sources"))

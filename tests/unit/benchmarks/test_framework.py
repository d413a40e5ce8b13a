"""Turns, tables, records and resumable rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Column, Table, header, write_record
from benchmarks.rows import RowFile, RowLog, earlier_rows, open_rows
from benchmarks.turns import in_turns

DEPENDENCIES = {"device": "a GPU", "sources": "abc"}


def test_sides_take_turns_and_are_compared_turn_by_turn() -> None:
    """The first turn of each does not count; the ratio is the median of ratios, not the ratio of medians."""
    calls: list[str] = []

    def side(name: str, *seconds: float) -> Callable[[], float]:
        remaining = iter(seconds)

        def turn() -> float:
            calls.append(name)
            return next(remaining)

        return turn

    turns = in_turns(side("ours", 9.0, 1.0, 2.0, 10.0), side("theirs", 9.0, 3.0, 20.0, 15.0), turns=3, warm=1)
    assert calls == ["ours", "theirs"] * 4
    assert turns.seconds == ((1.0, 2.0, 10.0), (3.0, 20.0, 15.0))
    assert (turns.median(), turns.median(1), turns.best(1)) == (2.0, 15.0, 3.0)
    assert turns.ratio() == 3.0


def test_a_table_shows_its_rows() -> None:
    table = Table(
        Column("side", "name"),
        Column("s", "seconds", ".2f"),
        Column("x", lambda row: f"{row['seconds'] / 2:.1f} x"),
        Column("loss", "loss"),
    )
    rows: list[dict[str, object]] = [{"name": "a|b", "seconds": 1.0}, {"name": "c", "seconds": 2.0, "loss": None}]
    text = table.without_empty_columns(rows).text(rows)
    assert text == "| side | s | x |\n| --- | --- | --- |\n| a\\|b | 1.00 | 0.5 x |\n| c | 2.00 | 1.0 x |"
    assert table.line(rows[1]) == "| c | 2.00 | 1.0 x |  |"


def test_a_record_has_a_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write_record(path, header("a GPU"), rows=[1, 2])
    record = json.loads(path.read_text())
    assert record["rows"] == [1, 2]
    assert record["header"]["device"] == "a GPU"
    assert all(record["header"][name] for name in ("cpus", "torch", "cuda", "driver", "date", "commit", "sources"))


def test_finished_rows_are_kept_for_the_same_hardware_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    open_rows(path, DEPENDENCIES, False)
    log = RowLog(path)
    log.begin("a")
    log.row("a", value=1.0)
    log.failed("b", "no reason")
    for _ in range(2):  # the file is written anew, and read again
        assert open_rows(path, DEPENDENCIES, False) == RowFile(rows={"a": {"value": 1.0}}, line_count=2)
    other = {**DEPENDENCIES, "sources": "abd"}
    assert (earlier_rows(path, DEPENDENCIES).rows, earlier_rows(path, other).rows) == ({"a": {"value": 1.0}}, {})
    assert open_rows(path, other, False).rows == {}
    assert '"row": "a"' in (tmp_path / "rows.jsonl.old").read_text()
    assert open_rows(path, DEPENDENCIES, False).rows == {}
    log.row("a", value=1.0)
    assert open_rows(path, DEPENDENCIES, True).rows == {}


def test_a_half_line_of_a_killed_process_does_not_damage_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": "a", "cells": {"na')
    RowLog(path).row("b", value=1.0)
    assert RowFile().read(path).rows == {"b": {"value": 1.0}}

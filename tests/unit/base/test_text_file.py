"""Text files: which characters end a line, the byte order mark, and whole numbers of any length."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron.base.text_file import parse_json, read_lines

NO_LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\nb\n", ["a", "b"]),
        ("a\r\nb\r\n\r\n", ["a", "b", ""]),
        ("\ufeffa\nb\ufeff", ["a", "b\ufeff"]),
        ("a\rb\n\n", ["a\rb", ""]),
        (NO_LINE_ENDS + "\n" + "\n".join(NO_LINE_ENDS), [NO_LINE_ENDS, *NO_LINE_ENDS]),
    ],
)
def test_lines_end_at_line_feeds_alone(tmp_path: Path, content: str, lines: list[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode())
    assert read_lines(path, "--file") == lines


def test_long_integers_are_read() -> None:
    assert parse_json('[1, 2.5, "a"]') == [1, 2.5, "a"]
    small, large = parse_json(f"[12, -{'9' * 5000}]")
    assert small == 12
    assert math.isinf(large)
    with pytest.raises(json.JSONDecodeError):
        parse_json(f"[{'9' * 5000}, ")

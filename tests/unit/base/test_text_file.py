"""Text files: which characters end a line, the byte order mark, and whole numbers of any length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.base.text_file import Numeral, parse_json, read_lines

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


def test_numbers_that_python_would_write_otherwise_stay_as_they_are_written() -> None:
    plain = ["1", "-12", "999999999999999999", "0.5", "-1e-07", "1e+16"]
    values = parse_json(f"[{', '.join(plain)}]")
    assert [json.dumps(value) for value in values] == plain
    others = ["9" * 19, "-" + "9" * 5000, "7" * 1_000_000, "-0", "1.50", "1E5", "1e400", "0.1000000000000000000001"]
    assert parse_json(f"[{', '.join(others)}]") == [Numeral(text) for text in others]
    assert float(Numeral("1.50")) == 1.5
    with pytest.raises(json.JSONDecodeError):
        parse_json(f"[{'9' * 5000}, ")

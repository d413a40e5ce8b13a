"""Text files: line ends, the byte order mark, and integers of any length."""

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
def test_lines_end_only_at_line_feeds(tmp_path: Path, content: str, lines: list[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode())
    assert read_lines(path, "--file") == lines


def test_numbers_that_python_would_write_differently_keep_their_text() -> None:
    plain = ["1", "-12", "999999999999999999", "0.5", "-1e-07", "1e+16"]
    values = parse_json(f"[{', '.join(plain)}]")
    assert [json.dumps(value) for value in values] == plain
    unusual = ["9" * 19, "-" + "9" * 5000, "7" * 1_000_000, "-0", "1.50", "1E5", "1e400", "0.1000000000000000000001"]
    assert parse_json(f"[{', '.join(unusual)}]") == [Numeral(text) for text in unusual]
    assert float(Numeral("1.50")) == 1.5
    with pytest.raises(json.JSONDecodeError):
        parse_json(f"[{'9' * 5000}, ")

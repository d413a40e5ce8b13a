"""The Python code of the documentation, as users copy it."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def python_blocks(page: str) -> list[str]:
    """The blocks of Python of a page under docs/, in order."""
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    return [section.partition("```")[0] for section in text.split("```python\n")[1:]]

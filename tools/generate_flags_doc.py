#!/usr/bin/env python3
"""Writes the generated pages and tables of docs/reference; --check tests whether they are current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.generate_flags_doc")

from megatron.compression.builtin import BUILTIN
from megatron.compression.registry import Registry
from tools.pages.compressors import page_with_tables
from tools.pages.flags import flags_markdown
from tools.pages.flags_of_others import flags_of_others_markdown

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
COMPRESSORS = tuple(name for name in sorted(BUILTIN) if (REFERENCE / "compressors" / f"{name}.md").is_file())
"""Compressors with a page."""


def documents() -> dict[Path, str]:
    """Content of each document with a generated part."""
    pages = {REFERENCE / "flags.md": flags_markdown(), REFERENCE / "flags-of-others.md": flags_of_others_markdown()}
    for name in COMPRESSORS:
        path = REFERENCE / "compressors" / f"{name}.md"
        pages[path] = page_with_tables(path.read_text(encoding="utf-8"), Registry(BUILTIN), name)
    return pages


def main(argv: list[str] | None = None) -> int:
    """Write or check the documents. Returns the exit status: 1 when --check finds one out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail when a file is out of date.")
    check = parser.parse_args(argv).check
    old = 0
    for document, content in documents().items():
        is_current = document.is_file() and document.read_text(encoding="utf-8") == content
        if not check and not is_current:
            document.write_text(content, encoding="utf-8")
            print(f"wrote {document}")
        elif not is_current:
            print(f"{document} is out of date; run python tools/generate_flags_doc.py", file=sys.stderr)
            old += 1
    return int(old > 0)

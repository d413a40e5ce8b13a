#!/usr/bin/env python3
"""Write docs/flags.md and docs/flags-of-others.md from the configuration; --check says whether they are current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.generate_flags_doc")

from megatron.config.others import flags_of_others_markdown
from megatron.config.reference import flags_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
DOCUMENTS = {DOCS / "flags.md": flags_markdown, DOCS / "flags-of-others.md": flags_of_others_markdown}


def main(argv: list[str] | None = None) -> int:
    """Write or check the documents. Returns the exit status: 1 when --check finds one out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail when a file is out of date.")
    check = parser.parse_args(argv).check
    old = 0
    for document, make in DOCUMENTS.items():
        wanted = make()
        if not check:
            document.parent.mkdir(exist_ok=True)
            document.write_text(wanted, encoding="utf-8")
            print(f"wrote {document}")
        elif not document.is_file() or document.read_text(encoding="utf-8") != wanted:
            print(f"{document} is out of date; run python tools/generate_flags_doc.py", file=sys.stderr)
            old += 1
    return int(old > 0)

#!/usr/bin/env python3
"""Write docs/flags.md from the configuration's dataclasses; --check only says whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.generate_flags_doc")

from megatron.config.reference import flags_markdown

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def main(argv: list[str] | None = None) -> int:
    """Write or check the document. Returns the exit status: 1 when --check finds it out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail when the file is out of date.")
    wanted = flags_markdown()
    if parser.parse_args(argv).check:
        if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{DOCUMENT} is out of date; run python tools/generate_flags_doc.py", file=sys.stderr)
        return 1
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    print(f"wrote {DOCUMENT}")
    return 0

"""Runs the checks of `make lint`: ruff, mypy, import-linter, sizes and names of the sources, and generated pages.

All checks run, even if one fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SOURCES = [
    "megatron",
    "benchmarks",
    "tasks",
    "tools",
    "tests",
    "ASPLOS23",
    "setup.py",
    "pretrain_gpt.py",
    "pretrain_bert.py",
    "pretrain_t5.py",
    "val_check_gpt.py",
]

IMPORTS = ["-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache", "--no-logo"]
"""Arguments that run import-linter, which cannot be run by ``-m``. Its contracts are in pyproject.toml."""


def steps(fix: bool, files: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """Name and Python arguments of every check; with ``files``, only of the checks of single files."""
    sources = list(files) or [name for name in SOURCES if (REPO / name).exists()]
    each = [
        ("ruff rules", ["-m", "ruff", "check", "--quiet", *(["--fix"] if fix else []), *sources]),
        ("ruff format", ["-m", "ruff", "format", "--quiet", *([] if fix else ["--diff"]), *sources]),
        ("types", ["-m", "mypy", "--no-error-summary", *(name for name in sources if name != "setup.py")]),
    ]
    whole = [
        ("imports", IMPORTS),
        ("sources", ["tools/check_sources.py"]),
        ("words", ["tools/check_words.py"]),
        ("pages of flags", ["tools/generate_flags_doc.py", *([] if fix else ["--check"])]),
    ]
    return each if files else [*each, *whole]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="let ruff fix and format the files")
    parser.add_argument("files", nargs="*", help="check only these files, with ruff and mypy")
    options = parser.parse_args()
    failed = []
    for name, arguments in steps(options.fix, [str(Path(file).resolve()) for file in options.files]):
        done = subprocess.run([sys.executable, *arguments], cwd=REPO)
        print(f"[lint] {name}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode != 0:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

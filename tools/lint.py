"""What `make lint` runs: ruff's rules and format, mypy, import-linter, sizes. All of them run; any problem fails."""

from __future__ import annotations

import argparse
import subprocess
import sys
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
    "val_check_gpt.py",
]

IMPORTS = ["-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache", "--no-logo"]
"""import-linter, which has no module that Python can run. Its contracts are in pyproject.toml."""


def steps(fix: bool) -> list[tuple[str, list[str]]]:
    """Name and arguments of Python of every check."""
    sources = [name for name in SOURCES if (REPO / name).exists()]
    return [
        ("ruff rules", ["-m", "ruff", "check", "--quiet", *(["--fix"] if fix else []), *sources]),
        ("ruff format", ["-m", "ruff", "format", "--quiet", *([] if fix else ["--diff"]), *sources]),
        ("types", ["-m", "mypy", "--no-error-summary", *(name for name in sources if name != "setup.py")]),
        ("imports", IMPORTS),
        ("sizes", ["tools/check_sizes.py"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="let ruff mend what it can, and rewrite in its format")
    options = parser.parse_args()
    failed = []
    for name, arguments in steps(options.fix):
        done = subprocess.run([sys.executable, *arguments], cwd=REPO)
        print(f"[lint] {name}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode != 0:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that files and functions stay short enough to be read: ``MAX_FILE_LINES`` and ``MAX_FUNCTION_LINES``."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKED = ("megatron", "benchmarks", "tasks", "tools", "ASPLOS23")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def check_file(path: Path, repo: Path) -> list[str]:
    """The problems of one file, each as one line."""
    where = path.relative_to(repo)
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source, filename=str(where))
    except SyntaxError as error:
        return [f"{where}:{error.lineno}: {error.msg}"]
    return [f"{where}:{problem}" for problem in _check_sizes(tree, source)]


def check_repository(repo: Path) -> list[str]:
    """The problems of all files."""
    return [problem for path in sorted(_sources(repo)) for problem in check_file(path, repo)]


def _sources(repo: Path) -> Iterator[Path]:
    yield from repo.glob("*.py")
    for top in CHECKED:
        yield from (repo / top).rglob("*.py")


def _check_sizes(tree: ast.Module, source: str) -> list[str]:
    problems = []
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        problems.append(f"1: {lines} lines, more than {MAX_FILE_LINES}: split the file")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(
                    f"{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}: split it"
                )
    return problems


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    problems = check_repository(Path(__file__).resolve().parents[1])
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

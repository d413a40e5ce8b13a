"""Checks that files and functions are short, and that no two public classes have the same name.

The limits are ``MAX_FILE_LINES`` and ``MAX_FUNCTION_LINES``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

CHECKED = ("megatron", "benchmarks", "tasks", "tools", "ASPLOS23")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 100


def check_file(path: Path, repo: Path) -> list[str]:
    """Check a file; return a line for each problem."""
    name = path.relative_to(repo)
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source, filename=str(name))
    except SyntaxError as error:
        return [f"{name}:{error.lineno}: {error.msg}"]
    return [f"{name}:{problem}" for problem in _check_sizes(tree, source)]


def check_repository(repo: Path) -> list[str]:
    """Check all files; return a line for each problem."""
    paths = sorted(_sources(repo))
    return [problem for path in paths for problem in check_file(path, repo)] + check_class_names(paths, repo)


def check_class_names(paths: Iterable[Path], repo: Path) -> list[str]:
    """Check that no two files have a public class of the same name; return a line for each problem."""
    problems: list[str] = []
    seen: dict[str, Path] = {}
    for path in paths:
        for name, line in _public_classes(path):
            first = seen.setdefault(name, path)
            if first != path:
                location, other = path.relative_to(repo), first.relative_to(repo)
                problems.append(f"{location}:{line}: class {name} has the name of a class in {other}: rename it")
    return problems


def _public_classes(path: Path) -> Iterator[tuple[str, int]]:
    """Names and lines of the top-level public classes of a file; none if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node.lineno


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

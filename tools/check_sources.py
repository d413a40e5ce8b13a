"""Checks that files and functions are short enough to be read, and that no two public classes have one name.

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
    paths = sorted(_sources(repo))
    return [problem for path in paths for problem in check_file(path, repo)] + check_class_names(paths, repo)


def check_class_names(paths: Iterable[Path], repo: Path) -> list[str]:
    """Public classes of files, private ones left out, whose name another file has given away before, as lines."""
    problems: list[str] = []
    seen: dict[str, Path] = {}
    for path in paths:
        for name, line in _public_classes(path):
            first = seen.setdefault(name, path)
            if first != path:
                where, other = path.relative_to(repo), first.relative_to(repo)
                problems.append(f"{where}:{line}: class {name} has the name of one in {other}: rename it")
    return problems


def _public_classes(path: Path) -> Iterator[tuple[str, int]]:
    """Names and lines of the public classes at the top of a file; none where it cannot be parsed."""
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

"""Checks that files and functions are short, and that no two public classes have the same name.

The limits are ``MAX_FILE_LINES`` and ``MAX_FUNCTION_LINES``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

CHECKED = ("megatron", "benchmarks", "tasks", "tools", "ASPLOS23")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 100


def check_file(path: Path, repo: Path, classes: dict[str, Path]) -> list[str]:
    """Check a file; return a line for each problem.

    Args:
        path: path of the file.
        repo: folder of the repository.
        classes: files of the public classes seen so far, by name; those of this file are added.
    """
    name = path.relative_to(repo)
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source, filename=str(name))
    except SyntaxError as error:
        return [f"{name}:{error.lineno}: {error.msg}"]
    problems = []
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        problems.append(f"{name}:1: {lines} lines, more than {MAX_FILE_LINES}: split the file")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(
                    f"{name}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}: split it"
                )
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            first = classes.setdefault(node.name, path)
            if first != path:
                other = f"a class in {first.relative_to(repo)}"
                problems.append(f"{name}:{node.lineno}: class {node.name} has the name of {other}: rename it")
    return problems


def check_repository(repo: Path) -> list[str]:
    """Check all files; return a line for each problem."""
    paths = [*repo.glob("*.py"), *(path for top in CHECKED for path in (repo / top).rglob("*.py"))]
    classes: dict[str, Path] = {}
    return [problem for path in sorted(paths) for problem in check_file(path, repo, classes)]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    problems = check_repository(Path(__file__).resolve().parents[1])
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

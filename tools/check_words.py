"""Checks that names say what they hold, and that docstrings and comments name things instead of paraphrasing them.

Counted over ``megatron/``: names such as ``found``, ``own`` or ``rest`` for variables, parameters and functions, per
1,000 lines; and the word "what" in docstrings and comments, per 10,000 words.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

VAGUE_NAMES = frozenset({
    "asked", "begun", "both", "came", "coming", "done", "due", "ended", "found", "given", "going", "gone", "held",
    "here", "kept", "known", "left", "less", "made", "meant", "more", "one", "ones", "others", "own", "owns",
    "part", "parts", "place", "rest", "said", "seen", "shown", "sides", "stand", "taken", "then", "there", "told",
    "waiting", "wanted", "what", "where", "which", "who", "whole", "wish",
})  # fmt: skip
MAX_VAGUE_NAMES = 1.0
"""Vague names per 1,000 lines."""
MAX_WHAT = 5.0
"""Occurrences of "what" per 10,000 words."""
_LISTED = 5
"""Number of files that a problem names."""


def check_words(folder: Path) -> list[str]:
    """Check a folder's Python files; return a line for too many vague names, and for too many uses of "what"."""
    lines = words = 0
    vague: dict[Path, int] = {}
    what: dict[Path, int] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines += path.read_text(encoding="utf-8").count("\n")
        vague[path] = sum(name.strip("_").lower() in VAGUE_NAMES for name in _bound_names(tree))
        prose = [word for text in _prose(path, tree) for word in re.findall(r"[a-z']+", text.lower())]
        words += len(prose)
        what[path] = prose.count("what")
    problems = []
    for title, counts, rate, limit in (
        ("vague names per 1,000 lines", vague, 1000 * sum(vague.values()) / max(lines, 1), MAX_VAGUE_NAMES),
        ('"what" per 10,000 words', what, 10000 * sum(what.values()) / max(words, 1), MAX_WHAT),
    ):
        if rate > limit:
            most = sorted(counts, key=lambda path: -counts[path])[:_LISTED]
            files = ", ".join(f"{path.relative_to(folder.parent)} ({counts[path]})" for path in most)
            problems.append(f"{folder.name}: {rate:.1f} {title}, more than {limit:g}; most in {files}")
    return problems


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def _prose(path: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings and comments of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    with tokenize.open(path) as stream:
        for token in tokenize.generate_tokens(stream.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    problems = check_words(Path(__file__).resolve().parents[1] / "megatron")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

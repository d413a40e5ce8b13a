"""Checks that packages import only downwards, and that files and functions stay readable.

The layers are those of docs/architecture.md: a package imports itself and packages of strictly lower layers, so
two packages of one layer do not know each other. Programs in the repository's folder, and those under examples/, are
commands, as tools/ is.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

DIVIDED = "megatron"
"""The package whose parts have layers of their own."""

LAYERS: dict[str, int] = {
    "megatron.base": 0,
    "megatron.kernels": 1,
    "megatron.compression": 2,
    "megatron.config": 3,
    "megatron.topology": 3,
    "megatron.comm": 4,
    "megatron.tokenizer": 4,
    "megatron.parallel": 5,
    "megatron.model": 6,
    "megatron.data": 6,
    "megatron.optimizer": 6,
    "megatron.checkpoint": 7,
    "megatron.training": 8,
    "megatron.inference": 9,
    "megatron.planner": 9,
    "megatron.evaluation": 10,
    "ASPLOS23": 11,
    "benchmarks": 11,
    "tools": 12,
    "tasks": 12,
    "examples": 12,
    "pretrain_gpt": 12,
    "val_check_gpt": 12,
    "setup": 12,
    "tests": 13,
}

NOT_CHECKED = ("tests",)
"""What may use everything, at any length."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "megatron.base": ("torch",),
    "megatron.kernels": ("torch.distributed",),
    "megatron.compression": ("torch.distributed",),
}
"""Packages that must not know of certain modules: flags are read without torch, algorithms never communicate."""

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every import of a file, wherever it stands: yields line and absolute dotted name.

    ``from a.b import c`` yields ``a.b.c``: c may be a module. Whoever compares names compares prefixes.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                if node.level > len(parents):
                    raise ValueError(f"line {node.lineno}: a relative import leaves the package")
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"


def check_file(path: Path, repo: Path) -> list[str]:
    """The problems of one file, each as one line."""
    where = path.relative_to(repo)
    parts = list(where.with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source, filename=str(where))
    except SyntaxError as error:
        return [f"{where}:{error.lineno}: {error.msg}"]
    problems = _check_sizes(tree, source)
    own = _package_of(module)
    if own != DIVIDED and own not in LAYERS:
        problems.append(f"1: {own} has no layer: add it to LAYERS in tools/check_layers.py")
    else:
        try:
            imports = list(imported_modules(tree, module, is_package))
        except ValueError as error:
            return [f"{where}: {error}"]
        for line, name in imports:
            problems += [f"{line}: {problem}" for problem in _check_import(own, name)]
        problems += _check_attributes(tree, own)
    return [f"{where}:{problem}" for problem in problems]


def check_repository(repo: Path) -> list[str]:
    """The problems of all files, those of packages that have no layer yet too."""
    problems: list[str] = []
    for path in sorted(_sources(repo)):
        problems += check_file(path, repo)
    return problems


def _sources(repo: Path) -> Iterator[Path]:
    yield from repo.glob("*.py")
    for top in {name.partition(".")[0] for name in LAYERS} - set(NOT_CHECKED):
        yield from (repo / top).rglob("*.py")


def _package_of(module: str) -> str:
    """``megatron.comm.ledger`` -> ``megatron.comm``; ``tools.quickstart.run`` -> ``tools``."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == DIVIDED else 1])


def _check_import(own: str, name: str) -> list[str]:
    for forbidden in FORBIDDEN.get(own, ()):
        if name == forbidden or name.startswith(forbidden + "."):
            return [f"{own} must not import {forbidden}"]
    other = _package_of(name)
    if own == DIVIDED:
        inside = name == DIVIDED or name.startswith(DIVIDED + ".")
        return [f"the root package imports none of its packages, not {name}"] if inside or other in LAYERS else []
    if other == own or other not in LAYERS or LAYERS[other] < LAYERS[own]:
        return []
    return [f"{own} (layer {LAYERS[own]}) must not import {name} (layer {LAYERS[other]}): only lower layers"]


def _check_attributes(tree: ast.Module, own: str) -> list[str]:
    """Uses of ``torch.distributed`` without an import of it, where it is forbidden."""
    if "torch.distributed" not in FORBIDDEN.get(own, ()):
        return []
    return [
        f"{node.lineno}: {own} must not use torch.distributed"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]


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
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    repo = Path(__file__).resolve().parents[1]
    problems = check_repository(repo)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

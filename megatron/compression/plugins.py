"""Compressors from outside the package: entry points of installed packages, and files named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megatron.base.errors import UserError, describe_failure
from megatron.base.user_function import load_function
from megatron.compression.builtin import BUILTIN
from megatron.compression.registry import Registry

ENTRY_POINTS = "megatron.compressors"
"""The group in which an installed package names its ``register(registry)`` functions."""


def build_registry(modules: Sequence[str] = ()) -> Registry:
    """Build the registry of built-in compressors, compressors of installed packages, and compressors of files.

    Args:
        modules: Python files, each with a function ``register(registry)``.

    Raises:
        UserError: when a file or an entry point cannot be used.
    """
    registry = Registry(BUILTIN)
    for entry_point in installed():
        _register(registry, entry_point.load, f"entry point {entry_point.name}")
    for name in modules:
        flag = f"--compress-module {name}"
        _register(registry, partial(load_function, flag, name, "register(registry)"), flag, name)
    return registry


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Entry points of installed packages; cached, because it reads the metadata of every package."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _register(registry: Registry, load: Callable[[], Any], source: str, file: str | None = None) -> None:
    try:
        load()(registry)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{source} cannot be used: {describe_failure(error, file)}") from error

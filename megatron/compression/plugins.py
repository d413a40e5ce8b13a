"""Compressors from outside the package: entry points of installed packages, and files named on the command line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from megatron.base.errors import UserError, describe_failure
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
        _register(registry, lambda path=name: _load_register(path), f"--compress-module {name}", name)
    return registry


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Entry points of installed packages; cached, because it reads the metadata of every package."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _register(registry: Registry, load: object, source: str, file: str | None = None) -> None:
    assert callable(load)
    try:
        load()(registry)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot be used: {describe_failure(error, file)}") from error


def _load_register(name: str) -> object:
    """Load the ``register`` function of a Python file."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"--compress-module {name}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"megatron_compressor_{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--compress-module {name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up string annotations here
    spec.loader.exec_module(module)
    if not callable(getattr(module, "register", None)):
        raise UserError(f"--compress-module {name}: it has no function register(registry)")
    return module.register

"""Functions in users' Python files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError, describe_failure


def load_function(flag: str, file: str, signature: str) -> Callable[..., Any]:
    """Run a user's Python file, and return a function that it defines.

    Args:
        flag: the flag and its value, for messages.
        file: the file.
        signature: name and arguments of the function, such as ``register(registry)``.

    Raises:
        UserError: when the file fails, or has no such function.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{flag}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"megatron_user_file_{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up string annotations here
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag} cannot be used: {describe_failure(error, file)}") from error
    function = getattr(module, signature.partition("(")[0], None)
    if not callable(function):
        raise UserError(f"{flag}: it has no function {signature}")
    return function

"""Runs programs of this clone from any folder.

A program in a folder of the clone does not find the clone's packages by itself, but it finds this file: Python looks in
the program's own folder first, and each folder of programs holds this file or a link to it.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]


def start_program(module: str) -> NoReturn:
    """End the process with the status of ``main`` of a module of the clone, called with the command line's words."""
    sys.path.insert(0, str(ROOT))
    sys.exit(import_module("megatron.base.start").start_program(module))

"""The process of one section: measures the rows that it is asked for, and records each when it is finished."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import cast

from benchmarks.gpu.setting import Section, setting_of
from benchmarks.rows import RowLog
from megatron.data.interrupt import stopped_in_order

NAMES = ("train", "fp8", "kernels", "generate", "network")


def section_of(name: str) -> Section:
    """The module of a section of this package, or of one with dots in its name."""
    module: Section = cast(Section, import_module(name if "." in name else f"benchmarks.gpu.{name}"))
    return module


def path_of(out: Path, name: str) -> Path:
    """Path of a section's file of rows."""
    return out / f"{name}.jsonl"


def main() -> int:
    name = sys.argv[1]
    setting, wanted = setting_of(sys.stdin.readline()), json.loads(sys.stdin.readline())
    try:
        with stopped_in_order():
            section_of(name).measure(setting, wanted, RowLog(path_of(setting.out, name)))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

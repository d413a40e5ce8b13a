"""``share_gpu.py SCRIPT ARGUMENTS``: a script as one of the ranks that a launcher started, which share a GPU."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    from _clone import start_program

    start_program("tests.support.share_gpu")

from tests.support.device import rank_variables


def main() -> int:
    os.environ.update(rank_variables(int(os.environ["RANK"])))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0

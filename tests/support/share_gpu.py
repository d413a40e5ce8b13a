"""``share_gpu.py SCRIPT ARGUMENTS``: runs a script as a rank that a launcher started, on a GPU that the ranks share."""

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

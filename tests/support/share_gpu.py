"""``share_gpu.py SCRIPT ARGUMENTS``: a script as one of the ranks that a launcher started, which share a GPU."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.device import rank_variables

if __name__ == "__main__":
    os.environ.update(rank_variables(int(os.environ["RANK"])))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

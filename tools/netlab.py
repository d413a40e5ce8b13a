#!/usr/bin/env python3
"""Runs a training command on hosts of its own making, with links of the rates you ask for; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.lab.command import main

    sys.exit(main())

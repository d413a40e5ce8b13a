#!/usr/bin/env python3
"""Predicts what a training run costs on a cluster, and what would be fastest there; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.planner.command import main

    sys.exit(main())

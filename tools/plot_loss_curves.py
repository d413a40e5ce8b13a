#!/usr/bin/env python3
"""Plots the losses of several runs; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.loss_curves import main

    sys.exit(main())

#!/usr/bin/env python3
"""Turns text into the `.bin/.idx` files that training reads; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.data.preprocess.command import main

    sys.exit(main())

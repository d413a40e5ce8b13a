#!/usr/bin/env python3
"""Converts checkpoints to and from Hugging Face and the classic Megatron layout; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.checkpoint.convert.command import main

    sys.exit(main())

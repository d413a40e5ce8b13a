#!/usr/bin/env python3
"""Serves a trained model over HTTP; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.inference.serve_command import main

    sys.exit(main())

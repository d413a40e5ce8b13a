#!/usr/bin/env python3
"""Evaluates a checkpoint on tasks of lm-evaluation-harness; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.evaluation.harness_command import main

    sys.exit(main())

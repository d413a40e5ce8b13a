#!/usr/bin/env python3
"""Lists what checkpoints hold, and whether they are intact; ``--help`` says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.checkpoint.list_command import main

    sys.exit(main())

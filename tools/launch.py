#!/usr/bin/env python3
"""Starts a program's ranks as torchrun does; when they fail, the last line says why."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.topology.launch_command import main

    sys.exit(main())

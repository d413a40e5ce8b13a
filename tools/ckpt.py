#!/usr/bin/env python3
"""Lists the contents of checkpoints, and checks that they are intact; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.convert.list_command")

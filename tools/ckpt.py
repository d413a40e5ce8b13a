#!/usr/bin/env python3
"""Lists what checkpoints hold, and whether they are intact; ``--help`` says how."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.convert.list_command")

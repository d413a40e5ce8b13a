#!/usr/bin/env python3
"""Generates text from a checkpoint of any layout; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.inference.generate_command")

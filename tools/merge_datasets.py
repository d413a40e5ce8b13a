#!/usr/bin/env python3
"""Joins `.bin/.idx` files into one pair; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.data.merge_command")

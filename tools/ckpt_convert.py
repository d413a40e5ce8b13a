#!/usr/bin/env python3
"""Converts checkpoints to and from Hugging Face and the classic Megatron layout; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.convert.command")

#!/usr/bin/env python3
"""Turns text into the `.bin/.idx` files that training reads; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.data.preprocess.command")

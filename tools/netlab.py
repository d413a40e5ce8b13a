#!/usr/bin/env python3
"""Runs a training command on virtual hosts whose links have given rates; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("benchmarks.lab.command")

#!/usr/bin/env python3
"""Runs a training command on hosts of its own making, with links of the rates you ask for; ``--help`` says how."""

from _clone import start_program

if __name__ == "__main__":
    start_program("benchmarks.lab.command")

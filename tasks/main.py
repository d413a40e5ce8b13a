#!/usr/bin/env python3
"""Evaluates a checkpoint on a zero-shot task; ``--help`` says how."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.evaluation.command")

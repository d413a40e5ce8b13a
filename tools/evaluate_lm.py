#!/usr/bin/env python3
"""Evaluates a checkpoint on tasks of lm-evaluation-harness; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.evaluation.harness_command")

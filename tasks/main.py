#!/usr/bin/env python3
"""Fine-tunes a model for a task, or evaluates one; ``--help`` says how."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.evaluation.command")

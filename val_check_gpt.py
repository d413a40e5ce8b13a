#!/usr/bin/env python
"""Measures the validation losses of a run's checkpoints, all on the same samples; ``--help`` says how."""

from megatron.base.start import start_program

if __name__ == "__main__":
    start_program("megatron.evaluation.sweep_command")

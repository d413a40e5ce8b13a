#!/usr/bin/env python
"""Measures the validation losses of a run's checkpoints, all on the same samples; ``--help`` says how."""

from megatron.evaluation.sweep_command import main

if __name__ == "__main__":
    raise SystemExit(main())

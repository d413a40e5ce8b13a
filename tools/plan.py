#!/usr/bin/env python3
"""Predicts what a training run costs on a cluster, and what would be fastest there; ``--help`` says how."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.planner.command")

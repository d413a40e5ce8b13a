#!/usr/bin/env python3
"""Predicts the cost of a training run on a cluster, and finds its fastest configuration; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.planner.command")

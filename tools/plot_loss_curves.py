#!/usr/bin/env python3
"""Plots the losses of several runs; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("benchmarks.loss_curves")

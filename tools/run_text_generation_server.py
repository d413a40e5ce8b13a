#!/usr/bin/env python3
"""Serves a trained model over HTTP; see ``--help``."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.inference.serve_command")

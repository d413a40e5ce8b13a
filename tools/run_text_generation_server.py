#!/usr/bin/env python3
"""Serves a trained model over HTTP; ``--help`` says how."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.inference.serve_command")

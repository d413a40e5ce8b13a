#!/usr/bin/env python3
"""Starts a program's ranks as torchrun does; when they fail, the last line says why."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.launcher.command")

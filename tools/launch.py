#!/usr/bin/env python3
"""Starts a program's ranks as torchrun does; if they fail, the last line gives the reason."""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.launcher.command")

#!/usr/bin/env python3
"""Chooses compressors for the flags of a run, as ``--compress auto`` does, and prints them without training:

python tools/launch.py --nproc-per-node 4 tools/choose.py FLAGS OF pretrain_gpt.py
"""

from _clone import start_program

if __name__ == "__main__":
    start_program("megatron.training.choose_command")

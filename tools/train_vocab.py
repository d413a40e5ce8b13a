#!/usr/bin/env python
"""Trains a byte-level BPE vocabulary on text, in GPT-2's two files; see ``--help``."""

import os

from _clone import start_program

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    start_program("megatron.data.preprocess.vocab_command")

#!/usr/bin/env python
"""Trains a byte-level BPE vocabulary on text, in GPT-2's two files; ``--help`` says how."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.data.preprocess.vocab_command import main

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main())

#!/usr/bin/env python3
"""Merges a checkpoint's tensor-parallel parts into one classic file: Megatron-DeepSpeed's command line.

    python tools/merge_mp_partitions.py --model-type GPT --load checkpoints --save merged --tensor-model-parallel-size 1

The same as tools/ckpt_convert.py --to classic, which does more; pipeline-parallel checkpoints are merged, too.
"""

import sys

from _clone import start_program

if __name__ == "__main__":
    sys.argv[1:1] = ["--model-type", "GPT"]  # makes classic the default of --to
    start_program("megatron.convert.command")

#!/usr/bin/env python3
"""Merges a checkpoint's tensor-parallel parts into one classic file: Megatron-DeepSpeed's command line.

    python tools/merge_mp_partitions.py --model-type GPT --load checkpoints --save merged --tensor-model-parallel-size 1

The same as tools/ckpt_convert.py --to classic, which does more; pipeline-parallel checkpoints are merged, too.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron.checkpoint.convert.command import main

    sys.exit(main(["--model-type", "GPT", *sys.argv[1:]]))  # which makes classic the default of --to

#!/usr/bin/env python
"""Pretrains GPT. On one process: ``python pretrain_gpt.py FLAGS``; on several:
``python tools/launch.py --nproc-per-node N pretrain_gpt.py FLAGS``, or under torchrun.

``--help`` lists the flags, grouped; ``--config FILE.yaml`` takes the same names.
"""

from megatron.base.start import train

if __name__ == "__main__":
    train()

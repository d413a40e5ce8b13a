#!/usr/bin/env python
"""Pretrains BERT. On one process: ``python pretrain_bert.py FLAGS``; on several:
``python tools/launch.py --nproc-per-node N pretrain_bert.py FLAGS``, or under torchrun.

``--help`` lists the flags, grouped; ``--config FILE.yaml`` takes the same names.
"""

from megatron.base.start import train_bert

if __name__ == "__main__":
    train_bert()

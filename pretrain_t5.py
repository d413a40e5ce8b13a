#!/usr/bin/env python
"""Pretrains T5. On one process: ``python pretrain_t5.py FLAGS``; on several:
``python tools/launch.py --nproc-per-node N pretrain_t5.py FLAGS``, or under torchrun.

``--help`` lists the flags, grouped; ``--config FILE.yaml`` takes the same names.
"""

from megatron.base.start import train_t5

if __name__ == "__main__":
    train_t5()

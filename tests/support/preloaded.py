"""Imported last by the process that ranks are forked from: ranks inherit its caches.

Programs keep parsers and the digest of the package between calls. Imported objects are
no garbage of a rank's: otherwise its collections would walk over all of torch, and copy every page that they count on.
"""

from __future__ import annotations

import gc

from megatron.compression.plugins import installed
from megatron.config.flags import build_run_parser
from megatron.config.model_types import PROGRAMS
from megatron.training.identity import identity_of

installed()
identity_of({})
for model_type, program in PROGRAMS.items():
    build_run_parser(program, model_type)
gc.collect()
gc.freeze()

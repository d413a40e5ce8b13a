"""``tools/choose.py``: the compressors that ``--compress auto`` would choose for a run, without training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.flags import parse_program
from megatron.distributed.process_group import LaunchEnvironment
from megatron.training.console import make_output_last
from megatron.training.pretrain import Job, resolve, train
from megatron.training.program import Ranks, run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the machines and links, choose, and print the choice and the flags that take it.

    The flags are those of ``pretrain_gpt.py``; ``--compress auto`` is implied. No weights are loaded, and nothing is
    saved.

    Args:
        argv: words of the command line; those of the process if None.

    Returns:
        The exit status.
    """
    make_output_last()

    def body(ranks: Ranks) -> None:
        words = list(sys.argv[1:] if argv is None else argv)
        parsed = parse_program(words, "gpt")
        compression = parsed.config.compression
        if not compression.is_auto:
            compression = replace(compression, compress=[*compression.compress, "auto"])
        compression = replace(compression, compress_adapt=False)
        parsed.config = replace(parsed.config, compression=compression)
        ranks.env = env = LaunchEnvironment.read(parsed.config.parallel.local_rank)
        config = replace(resolve(parsed, env), checkpoint=CheckpointConfig())
        job = Job(after_choice=lambda _parts, _chosen: None)
        train(ranks, config, parsed.notes, parsed.flag_fields, job)

    return run_program(body)

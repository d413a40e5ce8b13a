"""Training as ``pretrain_gpt.py`` does it, on ranks that start in a fraction of a second."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from megatron.training.pretrain import main
from tests.support.spawn import run_ranks


def train(world_size: int, *runs: Sequence[str], timeout: float = 240.0, env: Mapping[str, str] | None = None) -> None:
    """Runs ``pretrain_gpt.py FLAGS``, or several such runs in turn in the same processes. For its output and its exit
    code use ``cli.run_cli``.

    Raises:
        RankFailure: when a rank failed; with every rank's output.
    """
    run_ranks(world_size, _main, [list(flags) for flags in runs], timeout=timeout, env=env, init=False)


def _main(runs: list[list[str]]) -> None:
    for number, flags in enumerate(runs):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # keys of their own in the store
        status = main(flags)
        if status != 0:
            raise AssertionError(f"run {number} ended with status {status}")

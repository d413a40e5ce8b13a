"""Training as ``pretrain_gpt.py`` does it, on ranks that start in a fraction of a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.training.pretrain import main
from tests.support.spawn import run_ranks


def train(world_size: int, flags: Sequence[str], timeout: float = 240.0, env: Mapping[str, str] | None = None) -> None:
    """Runs ``pretrain_gpt.py FLAGS``. For its output and its exit code use ``cli.run_cli``.

    Raises:
        RankFailure: when a rank failed; with every rank's output.
    """
    run_ranks(world_size, _main, list(flags), timeout=timeout, env=env, init=False)


def _main(flags: list[str]) -> None:
    status = main(flags)
    if status != 0:
        raise AssertionError(f"ended with status {status}")

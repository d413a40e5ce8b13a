"""What pretrain_gpt.py runs: training, or the losses of checkpoints, which Optimus-CC's --get_val_ppls asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest

from megatron.base.words import spell


def asks_for_losses(words: Sequence[str]) -> bool:
    """Whether a command line asks for the losses of checkpoints instead of training."""
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and spell(flag) == "get-val-ppls":
            return (value if equals else after).lower() not in ("false", "no", "off", "0")
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Import lazily: each command has many imports that the other does not need.
    if asks_for_losses(words):
        from megatron.evaluation import sweep_command

        return sweep_command.main(words)
    from megatron.training import pretrain

    return pretrain.main(words)

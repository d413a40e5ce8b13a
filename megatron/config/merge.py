"""--use-checkpoint-args: the model's shape is taken from the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from megatron.base.errors import UserError
from megatron.base.option import field_options
from megatron.config.run import RunConfig, run_sections


def merge_checkpoint_config(
    cli_config: RunConfig,
    explicit_flags: Collection[str],
    saved: RunConfig,
    instead: str = ", or leave out --use-checkpoint-args",
) -> RunConfig:
    """`cli_config` (unresolved) with the model's shape and the tokenizer of `saved` (resolved).

    explicit_flags: dotted names of the fields that the user gave, as in `ParsedRun.explicit`. An explicit
    field that fixes the model's shape must agree with the checkpoint (UserError naming the flag otherwise);
    an explicit sequence length, tokenizer or vocabulary padding wins over it. instead: what else can be done about a
    flag that does not agree.
    """
    merged: dict[str, Any] = {}
    for section, cls in run_sections().items():
        ours, theirs = getattr(cli_config, section), getattr(saved, section)
        taken: dict[str, Any] = {}
        for described in field_options(section, cls):
            if not described.option.checkpoint:
                continue
            value = getattr(theirs, described.name)
            if described.path not in explicit_flags:
                taken[described.name] = value
                continue
            given = getattr(ours, described.name)
            if described.option.checkpoint == "shape" and given != value:
                raise UserError(
                    f"--{described.flag}: {given} was given but the checkpoint has {value}; leave the flag out{instead}"
                )
        merged[section] = dataclasses.replace(ours, **taken)
    return RunConfig(**merged)

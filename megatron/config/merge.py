"""Comparison of the model of a run with that of a checkpoint, and --use-checkpoint-args, which adopts its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megatron.base.errors import UserError
from megatron.base.option import FieldOption, field_options
from megatron.config.experts import ExpertsConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, run_sections

_EXPERT_COUNT_FIELDS = ("num_experts", "expert_interval", "moe_layer_freq")
"""Fields that together determine the number of experts per layer; different values may be equivalent."""


def merge_checkpoint_config(
    cli_config: RunConfig,
    explicit_flags: Collection[str],
    saved: RunConfig,
    advice: str = ", or leave out --use-checkpoint-args",
) -> RunConfig:
    """`cli_config` (unresolved) with the model shape and the tokenizer of `saved` (resolved).

    explicit_flags: dotted names of the fields set by the user, as in `ParsedRun.explicit`. An explicit shape field
    must match the checkpoint (UserError naming the flag otherwise); an explicit sequence length, tokenizer or
    vocabulary padding overrides the checkpoint. ``advice`` ends the message about a mismatch.
    """
    merged: dict[str, Any] = {}
    for section, cls in run_sections().items():
        ours, theirs = getattr(cli_config, section), getattr(saved, section)
        adopted_values: dict[str, Any] = {}
        for field_option in field_options(section, cls):
            if not field_option.option.checkpoint:
                continue
            value = getattr(theirs, field_option.name)
            if field_option.path not in explicit_flags:
                adopted_values[field_option.name] = value
                continue
            explicit_value = getattr(ours, field_option.name)
            if field_option.option.checkpoint == "shape" and explicit_value != value:
                raise UserError(
                    f"--{field_option.flag}: {explicit_value} was given but the checkpoint has {value}; leave the flag "
                    f"out{advice}"
                )
        merged[section] = dataclasses.replace(ours, **adopted_values)
    return RunConfig(**merged)


def differing_flags(model: ModelConfig, saved: Mapping[str, Any], upcycled: bool = False) -> dict[str, tuple[str, str]]:
    """Shape flags that differ from a checkpoint -> text of the flag in the run and in the checkpoint.

    Args:
        model: resolved model of the run.
        saved: ``model`` section of the checkpoint configuration; fields missing in older checkpoints are not compared.
        upcycled: the experts are initialized from the MLPs of the checkpoint, so expert fields are not compared.
    """
    model_values, differences = dataclasses.asdict(model), {}
    experts = {field.name for field in dataclasses.fields(ExpertsConfig)}
    theirs = ExpertsConfig(**{name: saved[name] for name in experts if name in saved})
    skipped_fields: Collection[str] = ()
    if upcycled or not (model.has_experts or theirs.has_experts):
        skipped_fields = experts
    elif model.expert_layers == theirs.expert_layers_of(model.num_layers):
        skipped_fields = _EXPERT_COUNT_FIELDS
    for field_option in field_options("model", ModelConfig):
        name = field_option.name
        if field_option.option.checkpoint != "shape" or name in skipped_fields or name not in saved:
            continue
        if saved[name] != model_values[name]:
            run_text, saved_text = (flag_as_written(field_option, values[name]) for values in (model_values, saved))
            differences[f"--{field_option.flag}"] = run_text, saved_text
    return differences


def flag_as_written(field_option: FieldOption, value: Any) -> str:
    """Command-line text of a flag with its value."""
    flag = f"--{field_option.flag}"
    if field_option.is_switch:
        return flag if value is not field_option.option.off_switch else f"no {flag}"
    words = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"no {flag}" if words in (None, "") else f"{flag} {words}"

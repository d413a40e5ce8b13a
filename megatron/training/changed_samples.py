"""Warnings about a run that continues with other samples or losses than its checkpoint was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.base.option import field_options
from megatron.config.merge import flag_as_written
from megatron.config.run import RunConfig, run_sections

_PATHS = ("data.data_path", "data.train_data_path")
_ORDER = (
    *("data.split", "data.dataloader_type", "data.sample_order", "training.seed"),
    *("data.mask_prob", "data.short_seq_prob"),
)
"""Fields that decide which samples are drawn, and in which order."""
_LENGTHS = ("model.seq_length", "model.decoder_seq_length")
_SAME_SAMPLES = ("data.eod_mask_loss", "data.reset_position_ids", "data.reset_attention_mask")
"""Fields that change the computation on the same samples."""
_SINCE_CYCLIC_PASSES = "max_skipped_steps"
"""A training flag that checkpoints have had since cyclic passes are shuffled separately."""
SECTIONS = ("model", "training", "data")
"""Configuration sections that hold these fields."""


def sample_warnings(config: RunConfig, saved: Mapping[str, Mapping[str, Any]], consumed_samples: int) -> list[str]:
    """Return a line for each flag that differs from the checkpoint's, with the consequences for consumed samples.

    Args:
        config: the resolved configuration.
        saved: sections of the checkpoint's configuration, by name; values that it lacks are not compared.
        consumed_samples: position of the run.
    """
    config_values, lines = config.to_dict(), []
    compared, sections = (*_PATHS, *_ORDER, *_LENGTHS, *_SAME_SAMPLES), run_sections()
    fields = [field for section in SECTIONS for field in field_options(section, sections[section])]
    for field_option in (field for field in fields if field.path in compared):
        section, name = field_option.path.split(".")
        if name not in saved.get(section, {}):
            continue
        ours, theirs = (values[section][name] for values in (config_values, saved))
        if name == "dataloader_type":
            ours, theirs = ("single" if value is None else value for value in (ours, theirs))
        if ours != theirs:
            our_flag, their_flag = flag_as_written(field_option, ours), flag_as_written(field_option, theirs)
            meaning = _explain(field_option.path, consumed_samples, theirs)
            lines.append(_line(our_flag, their_flag, meaning))
    cyclic = all(values.get("data", {}).get("dataloader_type") == "cyclic" for values in (config_values, saved))
    if cyclic and _SINCE_CYCLIC_PASSES not in saved.get("training", {}):
        meaning = _explain("data.dataloader_type", consumed_samples, None)
        our_flag = "--dataloader-type cyclic, which shuffles each pass by itself"
        lines.append(_line(our_flag, "an earlier version's, which shuffled all passes together", meaning))
    return lines


def _line(our_flag: str, their_flag: str, meaning: str) -> str:
    return f"warning: this run has {our_flag}; its checkpoint was saved with {their_flag}: {meaning}"


def _explain(path: str, consumed_samples: int, theirs: Any) -> str:
    """Explain the consequences of a difference for samples that count as consumed."""
    position = f"the run goes on at sample {consumed_samples:,} of an order"
    again = "samples that it has seen may come again, and others never"
    if path in _PATHS:
        return f"if these are other documents, {position} that it has not followed so far; {again}"
    if path in _ORDER:
        return f"{position} that it has not followed so far; {again}"
    if path in _LENGTHS:
        return f"{position} cut to another length, though the consumed samples had {theirs} tokens each; {again}"
    return f"the {consumed_samples:,} consumed samples stand, but losses before and after cannot be compared"

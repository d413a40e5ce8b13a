"""Identity of a command, equal on all ranks: its code, its flags and the contents of the files it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.base.code_digest import code_digest
from megatron.base.option import FieldOption, field_options
from megatron.base.regular import fingerprint
from megatron.compression.plugins import installed
from megatron.config.data import DatasetBlend, parse_blend
from megatron.data.indexed import dataset_files
from megatron.training.config_agreement import Identity


def identity_of(sections: Mapping[str, Any]) -> Identity:
    """Return the identity of the command that this rank is about to run.

    Args:
        sections: sections of the command's flags, by name; resolved if possible.

    Raises:
        UserError: when a blend of datasets cannot be read.
    """
    plugins = [f"{plugin.name} {plugin.dist.version if plugin.dist else ''}".strip() for plugin in installed()]
    identity = {
        "the code of the package megatron (a digest of its files)": code_digest(),
        "the version of torch": torch.__version__,
        "the list of installed compressors": ", ".join(sorted(plugins)) or "empty",
    }
    for section, values in sections.items():
        for field in field_options(section, type(values)):
            if not field.option.contents and not field.option.may_differ:
                identity[f"--{field.flag}"] = _format_value(field, getattr(values, field.name))
    for flag, words, blend in _flags_of_files(sections):
        identity[f"the number of words of --{flag}"] = str(len(words))
        blend = blend or DatasetBlend(())
        for number in range(len(blend.paths)):
            weight_text = f"{blend.weights[number]:g}" if blend.weights else "not given"
            identity[f"the weight of dataset {number + 1} of --{flag}"] = weight_text
    for name, path in input_files(sections):
        identity[name] = fingerprint(path)
    return identity


def _flags_of_files(sections: Mapping[str, Any]) -> Iterable[tuple[str, list[str], DatasetBlend | None]]:
    """Flags that name files, with their words, and the blend of datasets that these stand for, if any."""
    for section, values in sections.items():
        for field in field_options(section, type(values)):
            if not field.option.contents:
                continue
            value = getattr(values, field.name)
            words = [word for word in (value if isinstance(value, list) else [value]) if word is not None]
            yield field.flag, words, parse_blend(words, f"--{field.flag}") if field.option.contents == "blend" else None


def input_files(sections: Mapping[str, Any]) -> Iterable[tuple[str, Path]]:
    """Names, for the user, and paths of all files that flags name and that are equal on all ranks.

    Args:
        sections: sections of the command's flags, by name.

    Raises:
        UserError: when a blend of datasets cannot be read.
    """
    for flag, words, blend in _flags_of_files(sections):
        if blend is not None:
            for number, prefix in enumerate(blend.paths):
                for path in dataset_files(prefix):
                    yield f"the {path.suffix} file of dataset {number + 1} of --{flag}", Path(path)
        else:
            for number, word in enumerate(words):
                yield f"file {number + 1} of --{flag}", Path(word)


def _format_value(field: FieldOption, value: Any) -> str:
    if value is None:
        return "not given"
    if field.path == "compression.compress":
        # Each machine may keep a codec's scratch file elsewhere.
        specs = [[word for word in spec.split(",") if not word.strip().lower().startswith("folder=")] for spec in value]
        value = [",".join(words) for words in specs]
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value)) or "empty"

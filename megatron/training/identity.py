"""Identity of a command, equal on all ranks: its code, its flags and the contents of the files it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import megatron
from megatron.base.option import field_options
from megatron.base.regular import contents
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
    return {
        "the code of the package megatron (a digest of its files)": _digest(tuple(megatron.__path__)),
        "the version of torch": torch.__version__,
        "the list of installed compressors": ", ".join(sorted(plugins)) or "empty",
        **dict(_flags(sections)),
    }


@cache
def _digest(folders: Sequence[str]) -> str:
    """Digest of the modules below some folders, as they are at the first call."""
    digest = blake2b(digest_size=8)
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _flags(sections: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Values of all flags, and contents of the files that they name."""
    files = []
    for section, values in sections.items():
        for field in field_options(section, type(values)):
            value, option = getattr(values, field.name), field.option
            if option.contents:
                files.append((option.contents, field.flag, value if isinstance(value, list) else [value]))
            elif not option.may_differ:
                if value is None:
                    text = "not given"
                else:
                    if field.path == "compression.compress":
                        # Each machine may keep a codec's scratch file elsewhere.
                        specs = [
                            [word for word in spec.split(",") if not word.strip().lower().startswith("folder=")]
                            for spec in value
                        ]
                        value = [",".join(words) for words in specs]
                    text = (" ".join(map(str, value)) if isinstance(value, list) else str(value)) or "empty"
                yield f"--{field.flag}", text
    for kind, flag, words in files:
        present_words = [word for word in words if word is not None]
        yield f"the number of words of --{flag}", str(len(present_words))
        if kind == "blend":
            blend = parse_blend(present_words, f"--{flag}") or DatasetBlend(())
            for number, prefix in enumerate(blend.paths):
                dataset_name = f"dataset {number + 1} of --{flag}"
                yield f"the weight of {dataset_name}", f"{blend.weights[number]:g}" if blend.weights else "not given"
                for path in dataset_files(prefix):
                    yield f"the {path.suffix} file of {dataset_name}", contents(path)
        else:
            for number, path in enumerate(present_words):
                yield f"file {number + 1} of --{flag}", contents(path)

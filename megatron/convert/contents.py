"""Contents of a checkpoint folder: iterations, layouts, tensors, sizes, configurations, and their integrity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.base.documents import parse_yaml
from megatron.base.errors import UserError
from megatron.checkpoint.files import (
    TRACKER,
    Iteration,
    checkpoint_folder,
    parse_iteration,
    read_tracker_text,
    saved_iterations,
)
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.load import load_common, load_config_yaml
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.checkpoint.storage import check_file_sizes, check_items
from megatron.convert.classic import find_classic
from megatron.convert.hugging_face import is_hf
from megatron.kernels.dtypes import name_of_dtype

State = Literal["complete", "verified", "damaged"]
"""Complete: all files have their recorded sizes. Verified: all checksums match, too. Damaged: something differs."""


@dataclass(frozen=True)
class TensorSummary:
    """Summary of the tensors of a kind: model weights, an optimizer moment, compressor state.

    Args:
        tensors: number of tensors.
        numbers: number of elements.
        bytes: size in bytes.
        dtypes: names of their dtypes.
    """

    tensors: int
    numbers: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a checkpoint; empty if it is damaged.

    Args:
        iteration: iteration, or "release".
        folder: folder of the checkpoint.
        newest: whether the tracker names it.
        state, problem: its integrity, and a description of the damage.
        saved: Unix time in seconds at which its table of contents was written.
        ranks: number of ranks that wrote it.
        layout: tensor-, pipeline- and data-parallel sizes, and the expert-parallel size if above 1.
        files: bytes of each file.
        kinds: summaries of its tensors, by kind.
        shapes: type and shape of each tensor.
        position: the counters of the run.
        config: the configuration of the run, by section.
    """

    iteration: Iteration
    folder: Path
    newest: bool
    state: State
    problem: str | None = None
    saved: float | None = None
    ranks: int = 0
    layout: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, TensorSummary] = field(default_factory=dict)
    shapes: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def find_checkpoints(folder: Path) -> tuple[Path, list[Iteration]]:
    """Find the root folder of all checkpoints, and the checkpoints to inspect, oldest first.

    Args:
        folder: the folder that ``--save`` wrote to, or a checkpoint in it.

    Raises:
        UserError: when there is no checkpoint.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the one that --save wrote to")
    if folder.name in ("", ".."):  # without a name, such as "."
        folder = folder.resolve()
    folder_iteration = parse_iteration(folder.name.removeprefix("iter_"))
    is_checkpoint = (folder / MANIFEST).exists() or not saved_iterations(folder)
    if (
        folder_iteration is not None
        and checkpoint_folder(folder.parent, folder_iteration).name == folder.name
        and is_checkpoint
    ):
        return folder.parent, [folder_iteration]
    iterations: list[Iteration] = [*reversed(saved_iterations(folder))]
    if checkpoint_folder(folder, "release").is_dir():
        iterations.append("release")
    if iterations and not _is_classic(folder):
        return folder, iterations
    other = (
        "a Hugging Face folder" if is_hf(folder) else "a classic checkpoint of Megatron" if _is_classic(folder) else ""
    )
    if other:
        raise UserError(f"{folder} is {other}; tools/ckpt_convert.py --to megatron-cc converts it")
    raise UserError(f"{folder} holds no checkpoint; name the folder that --save wrote to")


def _is_classic(folder: Path) -> bool:
    try:
        return find_classic(folder) is not None
    except UserError:
        return False


def inspect_checkpoint(root: Path, iteration: Iteration, *, verify: bool) -> Contents:
    """Inspect a checkpoint.

    Args:
        root: the folder of all checkpoints.
        iteration: iteration of the checkpoint.
        verify: read all tensors and documents, and compare their checksums.
    """
    folder = checkpoint_folder(root, iteration)
    try:
        newest = parse_iteration(read_tracker_text(root)) == iteration
    except OSError:
        newest = False
    try:
        manifest = read_manifest(folder)
        problem = check_file_sizes(folder, manifest.files)
        if problem is None and verify:
            problem = check_items(folder, [*manifest.documents.values(), *manifest.items_of(manifest.tensors)])
        common = {} if problem else load_common(root, iteration, flag="--iteration")
        config = {} if problem else parse_yaml(load_config_yaml(root, iteration, flag="--iteration"), str(folder))
    except UserError as error:
        reason = str(error).partition("; ")[0]
        return Contents(iteration=iteration, folder=folder, newest=newest, state="damaged", problem=reason)
    names: dict[str, list[str]] = {}
    for name in manifest.tensors:
        first, _, remaining_name = name.partition(".")
        kind = f"{first}.{remaining_name.partition('.')[0]}" if first == "optimizer" else first
        names.setdefault(kind, []).append(name)
    kinds = {}
    for kind, members in names.items():
        tensors = [manifest.tensors[name] for name in members]
        kinds[kind] = TensorSummary(
            tensors=len(tensors),
            numbers=sum(math.prod(tensor.size) for tensor in tensors),
            bytes=sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors),
            dtypes=tuple(sorted({name_of_dtype(tensor.properties.dtype) for tensor in tensors})),
        )
    parallel = _mapping(config.get("parallel"))
    tp, pp = (parallel.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    if not parallel or not isinstance(tp, int) or not isinstance(pp, int) or tp * pp < 1:
        layout = {}
    else:
        sizes = {"tensor-parallel": tp, "pipeline": pp, "data-parallel": max(1, manifest.world_size // (tp * pp))}
        ep = parallel.get("expert_model_parallel_size")
        layout = {**sizes, "expert-parallel": ep} if isinstance(ep, int) and ep > 1 else sizes
    return Contents(
        iteration=iteration,
        folder=folder,
        newest=newest,
        state="damaged" if problem else "verified" if verify else "complete",
        problem=problem,
        saved=(folder / MANIFEST).stat().st_mtime,
        ranks=manifest.world_size,
        layout=layout,
        files=manifest.files,
        kinds=kinds,
        shapes={
            name: (name_of_dtype(tensor.properties.dtype), tuple(tensor.size))
            for name, tensor in sorted(manifest.tensors.items())
        },
        position=_mapping(common.get("progress")),
        config=config,
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def tracker_problem(root: Path) -> str | None:
    """The problem that --load has with the tracker file, which names the newest checkpoint; None if it is intact."""
    if not (root / TRACKER).exists():
        return f"{root / TRACKER} is missing: --load takes the newest complete checkpoint"
    try:
        read_tracker(root)
    except UserError as error:
        return str(error)
    return None

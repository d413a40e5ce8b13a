"""Loading of checkpoints. All data is checked before any memory changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron.base.documents import parse_yaml
from megatron.base.errors import UserError, first_line
from megatron.checkpoint.files import Iteration, checkpoint_folder
from megatron.checkpoint.find import describe_absence, fallback, read_tracker
from megatron.checkpoint.logical import LogicalShard
from megatron.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron.checkpoint.plain import decode_plain
from megatron.checkpoint.planner import ShardLoadPlanner
from megatron.checkpoint.save import COMMON, CONFIG, Log, ignore_single_process_warning, silent
from megatron.checkpoint.storage import ShardReader, check_file_sizes, check_items, read_into
from megatron.config.model_types import describe_model_type
from megatron.config.resolve_model import fill_rotary_scaling
from megatron.config.run import RunConfig
from megatron.distributed.agreement import first_problem, gather_texts, rank_of, run_together, size_of
from megatron.distributed.errors import format_ranks
from megatron.kernels.dtypes import dtype_from_name, name_of_dtype

SHOWN_DIFFERENCES = 4
_EXPERTS = ".mlp.experts."
_FLAGS_OF_SHAPES = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads")


def open_checkpoint(root: Path, iteration: Iteration, flag: str | None = None) -> tuple[Path, Manifest]:
    """Find the folder of a checkpoint below ``root``, the folder of all checkpoints, and read its manifest.

    ``flag`` selected the iteration; None for the tracker.

    Raises:
        UserError: when the checkpoint is missing or damaged; the message names a complete checkpoint.
    """
    folder = checkpoint_folder(root, iteration)
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist{fallback(root, iteration, flag)}")
    try:
        return folder, read_manifest(folder)
    except UserError as error:
        raise UserError(f"{error}{fallback(root, iteration, flag)}") from error


def _read_document(root: Path, iteration: Iteration, name: str, flag: str | None = None) -> bytes:
    """Read a small file of a checkpoint, and check its checksum."""
    folder, manifest = open_checkpoint(root, iteration, flag)
    item = manifest.documents.get(name)
    if item is None:
        raise UserError(f"{folder / MANIFEST} lists no {name}{fallback(root, iteration, flag)}")
    data = bytearray(item.length)
    if not read_into(folder, item, memoryview(data)):
        raise UserError(
            f"{folder / item.file} is missing, truncated or damaged: {item.length} bytes from {item.offset} "
            f"do not match their checksum{fallback(root, iteration, flag)}"
        )
    return bytes(data)


def load_common(root: str | Path, iteration: Iteration, flag: str | None = None) -> dict[str, Any]:
    """Read the ``common`` values of a checkpoint. Arguments and errors as for ``open_checkpoint``."""
    root = Path(root)
    data = _read_document(root, iteration, COMMON, flag)
    try:
        value = decode_plain(data)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__} instead of names and values")
    except ValueError as error:
        path = checkpoint_folder(root, iteration) / COMMON
        alternative = fallback(root, iteration, flag)
        raise UserError(f"{path} is not a valid file of a checkpoint: {first_line(error)}{alternative}") from error
    return value


def load_config_yaml(root: str | Path, iteration: Iteration, flag: str | None = None) -> str:
    """Read the configuration in a checkpoint as YAML. Arguments and errors as for ``open_checkpoint``."""
    data = _read_document(Path(root), iteration, CONFIG, flag)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        folder = checkpoint_folder(Path(root), iteration)
        alternative = fallback(Path(root), iteration, flag)
        raise UserError(f"{folder / CONFIG} is not a configuration: it is not UTF-8 text{alternative}") from error


def saved_kind(root: str | Path, iteration: Iteration) -> str:
    """The type and task of a checkpoint's model (``ModelConfig.type_and_task``); GPT if not in its configuration.

    Raises:
        UserError: when the checkpoint is missing or damaged.
    """
    model = saved_sections(root, iteration).get("model", {})
    classes = model.get("task_classes", 0)
    return describe_model_type(str(model.get("model_type", "gpt")), str(model.get("task_head", "none")), classes)


def saved_sections(root: str | Path, iteration: Iteration) -> dict[str, Mapping[str, Any]]:
    """Read the sections of a checkpoint's configuration, such as "model", by name and field.

    Raises:
        UserError: when the checkpoint is missing or damaged.
    """
    content = parse_yaml(load_config_yaml(root, iteration), f"{root}, iteration {iteration}")
    return {name: values for name, values in content.items() if isinstance(values, dict)}


def saved_config(
    root: str | Path, iteration: Iteration | None = None, flag: str = "--ckpt-step"
) -> tuple[RunConfig, Iteration]:
    """Read the configuration of the run that saved a checkpoint, and find the checkpoint's iteration.

    Args:
        root: folder of all checkpoints (``--save``).
        iteration: iteration of the checkpoint; None for the newest checkpoint.
        flag: flag of the command line that selects an iteration.

    Raises:
        UserError: when there is no checkpoint, or it is damaged.
    """
    if isinstance(iteration, int) and iteration < 0:
        raise UserError(f"{flag} {iteration}: iterations count from 0")
    chosen = read_tracker(root) if iteration is None else iteration
    if chosen is None:
        raise UserError(f"--load {root} {describe_absence(root)}")
    text = load_config_yaml(root, chosen, None if iteration is None else flag)
    config = RunConfig.from_yaml(text, f"{root}, iteration {chosen}")
    return replace(config, model=fill_rotary_scaling(config.model)), chosen


def saved_shapes(root: str | Path, iteration: Iteration, prefix: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Read global shapes and dtypes of the checkpoint's tensors, for names that begin with ``prefix``.

    Raises:
        UserError: when the checkpoint is missing or damaged.
    """
    tensors = open_checkpoint(Path(root), iteration)[1].tensors
    return {n: (tuple(t.size), t.properties.dtype) for n, t in tensors.items() if n.startswith(prefix)}


def load_tensors(
    root: str | Path,
    iteration: Iteration,
    tensors: Mapping[str, LogicalShard],
    group: dist.ProcessGroup | None = None,
    *,
    allow_unexpected: Callable[[str], bool] = lambda name: False,
    differing: Collection[str] = (),
    reads_data: bool = True,
    log: Log = silent,
) -> None:
    """Load tensors into the memory that ``tensors`` describes. A collective call on the group.

    If dtypes differ (fp32 into bf16), values are converted, and a log line reports it.

    Args:
        root: the folder of all checkpoints.
        iteration: iteration of the checkpoint.
        tensors: this rank's memory, by global name.
        group: a gloo group; None for this process only.
        allow_unexpected: is true for names of checkpoint tensors that no rank needs to request.
        differing: model flags whose values differ from the checkpoint's, if known.
        reads_data: whether to read the data, or only to check names and shapes.
        log: prints progress lines, on rank 0.

    Raises:
        UserError: on every rank, before any memory changes, when a file is missing, truncated or damaged, or when the
            checkpoint belongs to a different model.
        CommunicationError: when a peer is gone.
    """
    root = Path(root)
    folder, manifest = run_together(group, lambda: open_checkpoint(root, iteration))
    # The manifest has the checksums of all data. The local disk of a machine may hold another run's checkpoint.
    digests = gather_texts(group, blake2b(manifest.render()).hexdigest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise UserError(
            f"{folder} is not the same checkpoint on rank 0 and {format_ranks(different)}; "
            "give all machines the same files"
        )
    names = sorted(manifest.files)[rank_of(group) :: size_of(group)]
    _raise_if_damaged(root, iteration, group, check_file_sizes(folder, {name: manifest.files[name] for name in names}))
    local_specs = {
        name: [list(shard.global_shape), name_of_dtype(shard.dtype)]
        for name, shard in tensors.items()
        if all(shard.global_shape)
    }
    requested = {}
    for text in sorted(set(gather_texts(group, json.dumps(local_specs)))):
        for name, (shape, dtype) in json.loads(text).items():
            requested[name] = (tuple(shape), dtype_from_name(dtype))
    _check_model(folder, manifest, requested, allow_unexpected, differing)
    if not reads_data:
        return
    # Each rank checks a contiguous share of the items, of about equal bytes.
    requested_items = manifest.items_of(requested)
    total = max(1, sum(item.length for item in requested_items))
    items, before = [], 0
    for item in requested_items:
        middle = before + item.length // 2
        if min(size_of(group) - 1, middle * size_of(group) // total) == rank_of(group):
            items.append(item)
        before += item.length
    _raise_if_damaged(root, iteration, group, check_items(folder, items))
    if rank_of(group) == 0:
        conversions = Counter(
            (manifest.tensors[name].properties.dtype, dtype) for name, (_, dtype) in requested.items()
        )
        for (stored, dtype), count in conversions.items():
            if stored != dtype:
                log(f"converting {count} tensors of the checkpoint from {stored} to {dtype}")

    reader = ShardReader(folder, manifest)
    state: dict[str, Any] = {name: shard for name, shard in tensors.items() if name in requested}
    ignore_single_process_warning()
    with torch.no_grad():
        dcp.load(state, storage_reader=reader, planner=ShardLoadPlanner(), no_dist=True)
    _raise_if_damaged(root, iteration, group, reader.problem)


def _raise_if_damaged(root: Path, iteration: Iteration, group: dist.ProcessGroup | None, problem: str | None) -> None:
    agreed = first_problem(group, problem)
    if agreed is not None:
        raise UserError(f"{agreed}{fallback(root, iteration)}")


def _check_model(
    folder: Path,
    manifest: Manifest,
    requested: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    allow_unexpected: Callable[[str], bool],
    differing: Collection[str],
) -> None:
    """Check names, shapes and number types (floating-point or integer); all ranks reach the same result."""
    differences = []
    for name, (shape, dtype) in sorted(requested.items()):
        saved = manifest.tensors.get(name)
        if saved is None:
            differences.append(f"{name} is not in it")
        elif tuple(saved.size) != shape:
            differences.append(f"{name} has shape {tuple(saved.size)} instead of {shape}")
        elif saved.properties.dtype.is_floating_point != dtype.is_floating_point:
            differences.append(f"{name} is {saved.properties.dtype} instead of {dtype}")
    extra = sorted(name for name in set(manifest.tensors) - set(requested) if not allow_unexpected(name))
    differences += [f"{name} is in it, but not in this model" for name in extra]
    if not differences:
        return
    diffs, num_hidden = ", ".join(differences[:SHOWN_DIFFERENCES]), len(differences) - SHOWN_DIFFERENCES
    diffs += f" and {num_hidden} more" if num_hidden > 0 else ""
    if all(text.startswith("optimizer.") for text in differences):
        raise UserError(
            f"{folder} has the state of another optimizer: {diffs}; give --optimizer and its flags as its {CONFIG} has "
            "them, or --no-load-optim to begin with new moments"
        )
    entries = ["the vocabulary"] if not differing or any("word_embeddings" in text for text in differences) else []
    *leading_flags, last_flag = *(differing or _FLAGS_OF_SHAPES), *entries
    flags = f"{', '.join(leading_flags)} and {last_flag}" if leading_flags else last_flag
    dense = any(_EXPERTS in name for name in requested) and not any(_EXPERTS in name for name in manifest.tensors)
    upcycling = ", or --moe-use-upcycling to begin with a dense model's weights" if dense else ""
    raise UserError(
        f"{folder} is a checkpoint of another model: {diffs}; compare {flags} with its {CONFIG}, or pass "
        f"--use-checkpoint-args{upcycling}"
    )

"""The classic Megatron layout: ``mp_rank_TT[_PPP]/model_optim_rng.pt``, a file for each model-parallel rank.

Reads versions 0 to 3, of any tensor- and pipeline-parallel size, including interleaved stages; version 3 is written.
Files are unpickled with torch's weights-only loader: other objects (an argparse namespace, enums of the writer's code)
become inert placeholders, and none of their code runs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.user_text import format_value
from megatron.base.values import Values
from megatron.checkpoint.files import TRACKER, Iteration, folder_name, parse_iteration, read_tracker_text
from megatron.config.model import ModelConfig
from megatron.convert.model import Entry, Weights, model_of, stacks_gate_and_up, tensors_of
from megatron.convert.torch_file import StoredTensor, TorchFile
from megatron.parallel.tensor.shards import ParamSpec

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
GPT2_ENTRIES = 50257
VERSIONS = (0, 1, 2, 3)
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row per entry of the padded vocabulary."""


def find_classic(root: Path, iteration: int | None = None) -> Path | None:
    """Find the folder of a classic checkpoint's rank files: ``root`` itself, or the iteration that its tracker names.

    Raises:
        UserError: when the requested iteration is not there.
    """
    if _rank_files(root):
        if iteration is not None:
            raise UserError(f"--iteration {iteration}: {root} is itself a checkpoint; leave the flag out")
        return root
    selected: Iteration | None = iteration
    if selected is None and (root / TRACKER).is_file():
        selected = parse_iteration(read_tracker_text(root))
    if selected is not None and _rank_files(root / folder_name(selected)):
        return root / folder_name(selected)
    folders = [*root.glob("iter_*"), root / "release"] if iteration is not None else []
    other_names = sorted(path.name for path in folders if _rank_files(path))
    if other_names:
        raise UserError(f"--iteration {iteration}: {root} has no such checkpoint; it has {', '.join(other_names)}")
    return None


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """A folder's files by (tensor-parallel, pipeline-parallel) rank."""
    files = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and (path / FILE).is_file():
            files[int(match[1]), int(match[2] or 0)] = path / FILE
    return files


# Reading


class _Opaque:
    """Placeholder for objects of the writer's code, whose values are not needed."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _load(path: Path) -> TorchFile:
    """Load the file of a rank.

    Raises:
        UserError: when it cannot be read, or holds no model.
    """
    # Files refer to plain containers, numpy's random states, and the writer's code, which placeholders replace.
    allowed: list[Any] = [argparse.Namespace, np.ndarray, np.dtype]
    allowed += [type(np.dtype(kind)) for kind in (np.uint32, np.int64, np.float64)]
    rebuild = np.zeros(1).__reduce__()[0]
    allowed += [(rebuild, f"{module}.multiarray._reconstruct") for module in ("numpy.core", "numpy._core")]
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # not an archive: a file from before torch 1.6, or not a torch file; the loader reports which
        names = []
    # Python 3.11.0 to 3.11.3 write the member of an enum as an attribute of its class.
    getters = "builtins.getattr", "__builtin__.getattr"
    packages = "megatron", "deepspeed", "apex"
    allowed += [(_Opaque, name) for name in names if name.split(".")[0] in packages or name in getters]
    file = TorchFile(path, allowed)
    if not isinstance(file.content, dict) or not ("model" in file.content or "model0" in file.content):
        raise UserError(f"{path}: holds no model; give the folder of a classic Megatron checkpoint")
    return file


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flatten nested dictionaries to dotted names."""
    tensors: dict[str, Tensor] = {}
    for name, value in nested.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            tensors |= _flatten(value, f"{prefix}{name}.")
    return tensors


def _logical_name(name: str, first_layer: int) -> str | None:
    """Logical name of a tensor in a file; None if it is not a parameter (masks, copies)."""
    name = name.removeprefix("language_model.")
    name = re.sub(r"^(transformer|encoder)\.", "", name).replace(".attention.", ".self_attention.")
    for later, earlier in (("input_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")):
        name = name.replace(f".{later}.", f".{earlier}.")
    name = re.sub(r"^final_norm\.", "final_layernorm.", name)
    if name.startswith("word_embeddings_for_head."):
        return None
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match:
        is_parameter = not match[2].endswith("_extra_state") and "rotary" not in match[2]
        return f"layers.{first_layer + int(match[1])}.{match[2]}" if is_parameter else None
    return name if name.startswith(("embedding.", "final_layernorm.", "output_layer.")) else None


def read_classic(folder: Path, vocab_size: int | None = None) -> Weights:
    """Read a classic checkpoint of any tensor- and pipeline-parallel size.

    Args:
        folder: folder of the rank files.
        vocab_size: vocabulary entries without padding; None to take them from the file or its tokenizer.

    Raises:
        UserError: when files are missing, damaged, or of another kind of model.
    """
    paths = _rank_files(folder)
    tps, pps = sorted({tp for tp, _ in paths}), sorted({pp for _, pp in paths})
    for tp in range(tps[-1] + 1):
        for pp in range(pps[-1] + 1):
            if (tp, pp) not in paths:
                raise UserError(
                    f"{folder}: of the {tps[-1] + 1} x {pps[-1] + 1} ranks, mp_rank_{tp:02d}_{pp:03d} is missing"
                )
    files = {rank: _load(path) for rank, path in paths.items()}
    content = files[0, 0].content
    try:
        arguments = content.get("args")
        if not isinstance(arguments, argparse.Namespace) or not hasattr(arguments, "num_layers"):  # as in version 0
            raise UserError("the checkpoint does not hold its training arguments")
        args, header = Values(vars(arguments)), Values(content)
        version = header.number("checkpoint_version", 0)
        if version not in VERSIONS:
            raise UserError(f"checkpoint_version {version:g} is not known; {', '.join(map(str, VERSIONS))} are")
        iteration = header.integer("iteration", 0, minimum=0, maximum=10**18)
        model, padded = _model_of(args), args.integer("padded_vocab_size")
        entries_size = _vocab_size(args, vocab_size, padded, len(tps))
        if model.num_query_groups % len(tps):
            raise UserError(f"{model.num_query_groups} query groups cannot be in {len(tps)} tensor-parallel ranks")
    except UserError as error:
        raise UserError(f"{paths[0, 0]}: {error}") from error
    shards = [_stage_tensors(files, tp, len(pps), model, folder) for tp in range(len(tps))]
    expected = tensors_of(model, entries_size)
    for name, stored in shards[0].items():
        if name not in expected:
            raise UserError(f"{stored.file.path}: {stored.name} has no place in a model of its arguments")
    entries = {}
    for name, spec in expected.items():
        stored_shards = [shard[name] for shard in shards if name in shard]
        if len(stored_shards) != len(shards):
            raise UserError(f"{folder}: {name} is in {len(stored_shards)} of {len(shards)} tensor-parallel ranks")
        # The shards must have the shape that the arguments in the file specify, and a single dtype.
        shape, first = list(spec.logical_shape), stored_shards[0]
        if name in PADDED:
            shape[0] = padded
        if spec.dim is not None:
            if shape[spec.dim] % len(shards):
                raise UserError(
                    f"{first.file.path}: {name} has {shape[spec.dim]} rows or columns by its arguments, "
                    f"which cannot be in {len(shards)} ranks"
                )
            shape[spec.dim] //= len(shards)
        if stacks_gate_and_up(model, name):
            shape[:2] = [shape[0] * shape[1]]
        for stored in stored_shards:
            stored_shape, dtype = tuple(stored.like.shape), stored.like.dtype
            if stored_shape != tuple(shape):
                raise UserError(
                    f"{stored.file.path}: {name} has shape {stored_shape}, but its arguments specify {tuple(shape)}"
                )
            if dtype != first.like.dtype:
                raise UserError(f"{stored.file.path}: {name} is {dtype}, another rank's part of it {first.like.dtype}")
        read = _merged_reader(name, stored_shards, spec, model, version)
        entries[name] = Entry(spec.logical_shape, first.like.dtype, read)
    return Weights(model, entries_size, entries, iteration=iteration)


def _stage_tensors(
    files: Mapping[tuple[int, int], TorchFile],
    tp: int,
    stages: int,
    model: ModelConfig,
    folder: Path,
) -> dict[str, StoredTensor]:
    """A tensor-parallel rank's tensors of all stages and chunks, by logical name."""
    chunks = [name for name in files[tp, 0].content if isinstance(name, str) and re.fullmatch(r"model[0-9]+", name)]
    tensors: dict[str, StoredTensor] = {}
    num_layers = 0
    for name in [f"model{number}" for number in range(len(chunks))] or ["model"]:
        for stage in range(stages):
            file = files[tp, stage]
            content = file.content.get(name)
            if not isinstance(content, Mapping):
                raise UserError(f"{file.path}: {name} is not there, or holds no tensors by name")
            flat = _flatten(content)
            layers = {int(m[1]) for m in (re.search(r"layers\.(\d+)\.", key) for key in flat) if m}
            for key, tensor in flat.items():
                logical = _logical_name(key, num_layers)
                if logical is not None:
                    tensors.setdefault(logical, file.stored(key, tensor))
            num_layers += len(layers)
    if num_layers != model.num_layers:
        raise UserError(f"{folder}: the files hold {num_layers} layers, but their arguments specify {model.num_layers}")
    return tensors


def _merged_reader(
    name: str, stored: Sequence[StoredTensor], spec: ParamSpec, model: ModelConfig, version: float
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        shards = [entry.read() for entry in (stored if spec.dim is not None else stored[:1])]
        if "query_key_value" in name and version < 2 and model.num_query_groups == model.num_attention_heads:
            # To rows [head, query/key/value, channel], the order since version 2.
            heads, width = model.num_attention_heads // len(shards), model.kv_channels
            sizes, first = ((3, heads, width), 0) if version == 0 else ((heads, width, 3), 1)
            shards = [
                shard.view(*sizes, *shard.shape[1:]).transpose(first, first + 1).reshape(shard.shape)
                for shard in shards
            ]
        if stacks_gate_and_up(model, name):
            shards = [shard.view(2, -1, *shard.shape[1:]) for shard in shards]
        merged = torch.cat(shards, dim=spec.dim or 0) if len(shards) > 1 else shards[0]
        return merged[: spec.logical_shape[0]] if name in PADDED else merged

    return read


def _vocab_size(args: Values, requested: int | None, padded: int, tp: int) -> int:
    """Number of vocabulary entries without padding.

    Raises:
        UserError: when the embedding has more extra rows than padding can explain.
    """
    if requested is not None:
        if not 0 < requested <= padded:
            raise UserError(f"--vocab-size {requested}: the checkpoint's embedding has {padded} rows")
        return requested
    count = args.integer("orig_vocab_size", 0, minimum=0) or args.integer("vocab_size", 0, minimum=0)
    multiple = args.integer("make_vocab_size_divisible_by", 128)
    step = multiple * max(tp, args.integer("tensor_model_parallel_size", tp))  # merged files may keep their padding
    if count and not 0 <= padded - count < step:
        raise UserError(
            f"the vocabulary has {count} entries and its embedding {padded} rows by the arguments, which is not "
            f"padding to a multiple of {step}; give the number of entries with --vocab-size"
        )
    if count:
        return count
    if (
        args.text("tokenizer_type", "") == "GPT2BPETokenizer"
        and -(-GPT2_ENTRIES // (multiple * tp)) * multiple * tp == padded
    ):
        return GPT2_ENTRIES
    return padded


_SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "max_position_embeddings",
    "seq_length", "make_vocab_size_divisible_by",
)  # fmt: skip
_FLAGS = (
    "openai_gelu", "squared_relu", "bias_gelu_fusion", "swiglu", "untie_embeddings_and_output_weights",
    "add_bias_linear", "apply_layernorm_1p",
)  # fmt: skip
_NUMBERS = {
    "layernorm_epsilon": "norm_epsilon",
    "norm_epsilon": "norm_epsilon",
    "rotary_percent": "rotary_percent",
    "rotary_base": "rotary_base",
}
_UNSUPPORTED = (
    "apply_residual_connection_post_layernorm", "multi_latent_attention", "qk_layernorm",
    "rotary_interleaved",
)  # fmt: skip
"""Arguments for computations that our models lack."""


def _model_of(args: Values) -> ModelConfig:
    """Model configuration from a file's arguments."""
    for name in _UNSUPPORTED:
        if args.flag(name, False):
            raise UserError(f"{name} cannot be converted: our models do not compute that")
    experts = args.get("num_experts")
    if experts not in (None, 1, [1]):
        raise UserError(f"num_experts {format_value(experts)} cannot be converted: only models without experts can")
    values: dict[str, object] = {name: args.integer(name) for name in _SIZES if args.has(name)}
    values |= {name: args.flag(name, False) for name in _FLAGS if args.has(name)}
    values |= {ours: args.number(theirs) for theirs, ours in _NUMBERS.items() if args.has(theirs)}
    if args.has("normalization"):
        values["normalization"] = args.text("normalization")
    kind = args.text("position_embedding_type", "learned_absolute")
    if kind == "rope" or args.flag("use_rotary_position_embeddings", False):
        values["position_embedding_type"] = "rope"
        factor = args.number("rotary_seq_len_interpolation_factor", 1.0)
        if args.flag("use_rope_scaling", False):
            if factor != 1.0:
                raise UserError(
                    "use_rope_scaling and rotary_seq_len_interpolation_factor are both set; only one can be"
                )
            values |= {"rotary_scaling": "llama3", "rotary_scaling_factor": args.number("rope_scaling_factor", 8.0)}
        elif factor != 1.0:
            values |= {"rotary_scaling": "linear", "rotary_scaling_factor": factor}
    elif kind == "none" or not args.flag("add_position_embedding", True):
        values["position_embedding_type"] = "none"
    elif kind != "learned_absolute":
        raise UserError(f"position_embedding_type {kind!r} cannot be converted; learned_absolute, rope and none can")
    values["add_qkv_bias"] = args.flag("add_qkv_bias", False) and not values.get("add_bias_linear", True)
    if args.flag("group_query_attention", False) and args.has("num_query_groups"):
        values["num_query_groups"] = args.integer("num_query_groups")
    if "seq_length" not in values:
        values["seq_length"] = args.integer("max_position_embeddings")
    return model_of(**values)

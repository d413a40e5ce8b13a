"""Writes the classic Megatron layout, version 3, at any tensor- and pipeline-parallel size.

torch writes the files with space reserved for the tensors' bytes, which are filled in tensor by tensor afterwards, so
no file has to fit into memory.
"""

from __future__ import annotations

import argparse
import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER, Iteration, folder_name
from megatron.checkpoint.storage import tensor_bytes
from megatron.config.model import ModelConfig
from megatron.convert.classic import FILE
from megatron.convert.gemma import non_gemma_requirements
from megatron.convert.model import Weights, stacks_gate_and_up, tensors_of
from megatron.convert.tokenizer_files import build_fitting_tokenizer, copy_tokenizer
from megatron.models.stages import padded_vocab_size
from megatron.parallel.tensor.shards import ParamSpec

_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Offsets of the checksum in the local and central headers of a zip archive."""


@dataclass
class _RankFile:
    """A rank's file while it is being filled.

    Args:
        path: path of the file.
        offsets: offset of each tensor's bytes, by name.
        sizes: number of bytes of each tensor.
        records: names of the archive's records, by offset.
        crcs: checksums of the records written so far, by record name.
    """

    path: Path
    offsets: dict[str, int]
    sizes: dict[str, int]
    records: dict[int, str]
    crcs: dict[str, int] = field(default_factory=dict)

    def fill(self, name: str, values: Tensor, zeros: int = 0) -> None:
        """Write a tensor's bytes at its offset, followed by ``zeros`` zero elements.

        Raises:
            ValueError: when they do not fill the reserved space exactly.
        """
        data, padding = tensor_bytes(values), bytes(zeros * values.element_size())
        if len(data) + len(padding) != self.sizes[name]:
            raise ValueError(f"{name} has {len(data) + len(padding)} bytes instead of the reserved {self.sizes[name]}")
        with self.path.open("r+b") as stream:
            stream.seek(self.offsets[name])
            stream.write(data)
            stream.write(padding)
        self.crcs[self.records[self.offsets[name]]] = zlib.crc32(padding, zlib.crc32(data))

    def seal(self) -> None:
        """Write the checksums of the filled records into the archive."""
        with zipfile.ZipFile(self.path) as archive:
            start, infos = archive.start_dir, archive.infolist()
        with self.path.open("r+b") as stream:
            for info in infos:
                stream.seek(start)
                header = stream.read(46)
                lengths = struct.unpack("<HHH", header[28:34])
                if info.filename in self.crcs:
                    packed = struct.pack("<I", self.crcs[info.filename])
                    for offset in (start + _CENTRAL_CRC, info.header_offset + _LOCAL_CRC):
                        stream.seek(offset)
                        stream.write(packed)
                start += 46 + sum(lengths)
            stream.flush()
            os.fsync(stream.fileno())


def write_classic(weights: Weights, root: Path, tp: int, pp: int, advance: Callable[[int], object]) -> None:
    """Write ``root/iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt``, the tracker and the tokenizer's files.

    A model without an iteration is saved as ``release``, since Megatron-LM refuses iteration 0.

    Args:
        weights: weights to write.
        root: an existing, empty folder.
        tp, pp: tensor- and pipeline-parallel size of the result.
        advance: called with the number of bytes of each tensor written.

    Raises:
        UserError: when the sizes do not divide the model, or the layout does not support it.
    """
    model = weights.model
    # A model that the layout's arguments cannot describe would be read as another model.
    forms = {flag.removeprefix("no --"): is_default for flag, is_default in non_gemma_requirements(model).items()}
    features = {
        f"model of kind {model.type_and_task}": model.type_and_task != "gpt",
        "--parallel-residual": model.parallel_residual,
        "--sliding-window": model.sliding_window is not None,
        "--num-experts": model.has_experts,
        "--qk-layernorm": model.qk_layernorm,
        **{f"--{form}": not is_default for form, is_default in forms.items() if form != "apply-layernorm-1p"},
        "--rotary-scaling yarn": model.rotary_scaling == "yarn",
        "--rotary-scaling-factor with a fraction": model.rotary_scaling == "linear"
        and not model.rotary_scaling_factor.is_integer(),
    }
    if model.rotary_scaling == "llama3":
        llama3 = {"original_length": 8192, "low_turns": 1.0, "high_turns": 4.0}
        features |= {
            f"--rotary-scaling-{parameter.replace('_', '-')} of its own": getattr(model, f"rotary_scaling_{parameter}")
            != usual
            for parameter, usual in llama3.items()
        }
    unsupported = [feature for feature, is_set in features.items() if is_set]
    if unsupported:
        raise UserError(
            f"--to classic: that layout has no {' and no '.join(unsupported)}; keep it in our own format, or --to hf"
        )
    build_fitting_tokenizer(weights.tokenizer, weights.vocab_size)
    for flag, size, count, dimension in (
        ("--target-tensor-model-parallel-size", tp, model.num_attention_heads, "heads"),
        ("--target-tensor-model-parallel-size", tp, model.num_query_groups, "query groups"),
        ("--target-tensor-model-parallel-size", tp, model.ffn_hidden_size, "rows of the MLP"),
        ("--target-pipeline-model-parallel-size", pp, model.num_layers, "layers"),
    ):
        if count % size:
            raise UserError(f"{flag} {size} does not divide the {count} {dimension}; choose a divisor")
    saved: Iteration = weights.iteration or "release"
    folder = root / folder_name(saved)
    padded = padded_vocab_size(weights.vocab_size, model.make_vocab_size_divisible_by, tp)
    specs = tensors_of(model, padded)
    files = {(t, p): _reserve_file(weights, specs, folder, t, p, tp, pp, padded) for p in range(pp) for t in range(tp)}
    for name, entry in weights.entries.items():
        tensor = entry.read()
        missing = specs[name].logical_shape[0] - tensor.shape[0]
        for (t, _), file in files.items():
            for key in (name, f"copy of {name}"):
                if key not in file.offsets:
                    continue
                if missing:
                    rows = padded // tp
                    shard = tensor[t * rows : (t + 1) * rows]
                    file.fill(key, shard, (rows - shard.shape[0]) * model.hidden_size)
                else:
                    file.fill(key, _tensor_shard(name, tensor, specs[name], model, t, tp))
        advance(tensor.numel() * tensor.element_size())
    for file in files.values():
        file.seal()
    copy_tokenizer(weights.tokenizer, root)
    (root / TRACKER).write_text(f"{saved}\n")


def _tensor_shard(name: str, tensor: Tensor, spec: ParamSpec, model: ModelConfig, t: int, tp: int) -> Tensor:
    """A tensor-parallel rank's slice of a tensor."""
    shard = tensor if spec.dim is None else tensor.chunk(tp, dim=spec.dim)[t]
    return shard.flatten(0, 1) if stacks_gate_and_up(model, name) else shard


def _reserve_file(
    weights: Weights, specs: dict[str, ParamSpec], folder: Path, t: int, p: int, tp: int, pp: int, padded: int
) -> _RankFile:
    """Write a rank's file with space reserved for its tensors."""
    model = weights.model
    per_stage = model.num_layers // pp
    reserved: dict[str, Tensor] = {}

    def reserve(name: str, key: str | None = None) -> Tensor:
        # Memory that is never touched is never allocated.
        tensor = torch.empty(specs[name].logical_shape, dtype=weights.entries[name].dtype, device="meta")
        shard = _tensor_shard(name, tensor, specs[name], model, t, tp)
        reserved[key or name] = torch.empty(shard.shape, dtype=shard.dtype)
        return reserved[key or name]

    language: dict[str, Any] = {}
    if p == 0:
        language["embedding"] = {"word_embeddings": {"weight": reserve("embedding.word_embeddings.weight")}}
        if "embedding.position_embeddings.weight" in specs:
            positions = {"weight": reserve("embedding.position_embeddings.weight")}
            language["embedding"]["position_embeddings"] = positions
    encoder: dict[str, Tensor] = {}
    for layer in range(per_stage):
        at = f"layers.{p * per_stage + layer}."
        for name in (name for name in specs if name.startswith(at)):
            encoder[f"layers.{layer}.{name.removeprefix(at)}"] = reserve(name)
    if p == pp - 1:
        encoder |= {name: reserve(name) for name in specs if name.startswith("final_layernorm.")}
    language["encoder"] = encoder
    saved_model: dict[str, Any] = {"language_model": language}
    if p == pp - 1 and "output_layer.weight" in specs:
        language["output_layer"] = {"weight": reserve("output_layer.weight")}
    elif p == pp - 1 and pp > 1:
        tied = "embedding.word_embeddings.weight"
        saved_model["word_embeddings_for_head"] = {"weight": reserve(tied, f"copy of {tied}")}
    name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
    path = folder / name / FILE
    path.parent.mkdir(parents=True)
    content = {
        "args": argparse.Namespace(**_arguments(weights, tp, pp, padded)),
        "checkpoint_version": 3.0,
        "iteration": weights.iteration,
        "model": saved_model,
    }
    try:
        with torch.serialization.skip_data():
            torch.save(content, path)
    except RuntimeError as error:  # torch's archive writer fails like this, without a reason
        raise OSError(errno.EIO, "the file cannot be written; is the disk full?") from error
    reader: Any = torch._C.PyTorchFileReader(str(path))
    prefix = path.stem
    # torch writes storages in the order in which it encounters them, the order of ``reserved``.
    offsets, records = {}, {}
    for number, name in enumerate(reserved):
        offset = reader.get_record_offset(f"data/{number}")
        offsets[name] = offset
        records[offset] = f"{prefix}/data/{number}"
    return _RankFile(path, offsets, {name: tensor.nbytes for name, tensor in reserved.items()}, records)


def _arguments(weights: Weights, tp: int, pp: int, padded: int) -> dict[str, Any]:
    """Arguments that readers of the layout look for, as plain types."""
    dtype = weights.entries["embedding.word_embeddings.weight"].dtype
    model, tokenizer = weights.model, weights.tokenizer
    linear = model.rotary_scaling == "linear"
    grouped = model.num_query_groups != model.num_attention_heads
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "kv_channels": model.kv_channels,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.max_position_embeddings,
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "openai_gelu": model.openai_gelu,
        "squared_relu": model.squared_relu,
        "bias_gelu_fusion": model.bias_gelu_fusion,
        "swiglu": model.swiglu,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "normalization": model.normalization,
        "add_bias_linear": model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "add_qkv_bias": model.add_qkv_bias,
        "position_embedding_type": "rope" if model.position_embedding_type == "rope" else "learned_absolute",
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "rotary_percent": model.rotary_percent,
        "rotary_base": model.rotary_base,
        "use_rope_scaling": model.rotary_scaling == "llama3",
        "rope_scaling_factor": model.rotary_scaling_factor,
        "rotary_seq_len_interpolation_factor": int(model.rotary_scaling_factor) if linear else None,
        "group_query_attention": grouped,
        "num_query_groups": model.num_query_groups if grouped else 1,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "orig_vocab_size": weights.vocab_size,
        "padded_vocab_size": padded,
        "tokenizer_type": tokenizer.tokenizer_type,
        "vocab_file": tokenizer.vocab_file,
        "merge_file": tokenizer.merge_file,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }

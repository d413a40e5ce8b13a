"""Hugging Face folders: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.convert.architectures import hf_config, model_of_config
from megatron.convert.gemma import text_config
from megatron.convert.model import Entry, Weights
from megatron.convert.names import Rule, rules
from megatron.convert.safetensors_file import DTYPES, SafetensorsFile
from megatron.convert.tokenizer_files import copy_tokenizer, special_ids
from megatron.convert.torch_file import StoredTensor, TorchFile
from megatron.models.embedding import TIED_NAME

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD_BYTES = 5 << 30
_IN_A_LAYER = re.compile(r"\b(h|layers?)\.[0-9]+\.")
_NO_WEIGHTS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$|\bvision_tower\.")
"""Masks and tables that older files hold beside a layer's weights, and the image encoder of Gemma 3."""
HEADS = ("lm_head.weight", "cls.predictions.decoder.weight")
_OTHER_PREFIXES = (
    ("transformer.", ""),
    ("deberta.", ""),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("embed_out.", "lm_head."),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
"""Alternative name prefixes: the original GPT-2 files omit the prefix, models with an image encoder add to it."""


def is_hf(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return (folder / CONFIG).is_file()


# Hugging Face to Megatron-CC


def read_hf(folder: Path) -> Weights:
    """Read a model of a supported architecture.

    Raises:
        UserError: when the architecture is not supported, or a file is missing or damaged.
    """
    full_config = Values(_read_json(folder / CONFIG))
    try:
        config = text_config(full_config)
        model = model_of_config(config)
        vocab_size = config.integer("vocab_size")
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    stored = _StoredFiles(folder)
    entries, used = {}, set()
    for rule in rules(model, vocab_size):
        sources = [stored.entry(name, shape) for name, shape in rule.theirs]
        used |= {stored.name_of(name) for name, _ in rule.theirs}
        dtype = functools.reduce(torch.promote_types, (source.dtype for source in sources))
        read = functools.partial(_read_joined, rule, [source.to(dtype) for source in sources])
        entries[rule.ours] = Entry(rule.shape, dtype, read)
    for name in sorted(set(stored.paths) - used):
        if _IN_A_LAYER.search(name) and not _NO_WEIGHTS.search(name):
            raise UserError(f"{stored.paths[name]}: {name} has no place in the model that {CONFIG} describes")
    if model.ties_embeddings:
        embedding = entries[TIED_NAME]
        for name in filter(stored.paths.__contains__, map(stored.name_of, HEADS)):
            head = stored.entry(name, embedding.shape).read()
            if not torch.equal(head.to(embedding.dtype), embedding.read()):
                raise UserError(
                    f"{stored.paths[name]}: {name} differs from the embedding, although {CONFIG} ties both; write "
                    f'"tie_word_embeddings": false into {CONFIG} to keep it'
                )
    return Weights(model, vocab_size, entries, left_out="" if config is full_config else "the image encoder")


def _read_joined(rule: Rule, entries: Sequence[Entry]) -> Tensor:
    return rule.join([entry.read() for entry in entries]).contiguous()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: does not hold names and values")
    return content


class _StoredFiles:
    """The tensors of a folder, in safetensors or ``torch.save`` files (``pytorch_model*.bin``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pickled: dict[str, StoredTensor] = {}
        self.paths: dict[str, Path] = {}
        if (folder / INDEX).is_file():
            self.paths = _read_index(folder / INDEX)
        elif (folder / SINGLE).is_file():
            with _open_safetensors(folder / SINGLE) as file:
                self.paths = dict.fromkeys(file.keys(), folder / SINGLE)
        elif (folder / PICKLED).is_file():
            self._pickled = _load_pickled(folder / PICKLED)
            self.paths = dict.fromkeys(self._pickled, folder / PICKLED)
        elif (folder / PICKLED_INDEX).is_file():
            self.paths = _read_index(folder / PICKLED_INDEX)
            contents = {path: _load_pickled(path) for path in sorted(set(self.paths.values()))}
            for name, path in self.paths.items():
                if name not in contents[path]:
                    raise UserError(f"{path} does not hold {name}, although {PICKLED_INDEX} lists it")
                self._pickled[name] = contents[path][name]
        else:
            raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX} nor {PICKLED} nor {PICKLED_INDEX}")

    def name_of(self, name: str) -> str:
        """Name of a tensor in the files, whose prefixes differ."""
        for prefix, other in _OTHER_PREFIXES:
            candidate = other + name.removeprefix(prefix)
            if name not in self.paths and name.startswith(prefix) and candidate in self.paths:
                return candidate
        return name

    def entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Entry of a required tensor, which must have the given shape."""
        stored = self.name_of(name)
        if stored not in self.paths:
            raise UserError(f"{self.folder}: there is no tensor {name}; the files are incomplete, or of another model")
        if self._pickled:
            sizes, dtype = tuple(self._pickled[stored].like.shape), self._pickled[stored].like.dtype
        else:
            with _open_safetensors(self.paths[stored]) as file:
                if stored not in file.keys():  # noqa: SIM118  # not a mapping
                    raise UserError(f"{self.paths[stored]} does not hold {stored}, although {INDEX} lists it")
                view = file.get_slice(stored)
                sizes, dtype_name = tuple(view.get_shape()), view.get_dtype()
                if dtype_name not in DTYPES.values():
                    raise UserError(
                        f"{self.paths[stored]}: {stored} is of type {dtype_name}, which cannot be converted"
                    )
                dtype = next(dtype for dtype, name in DTYPES.items() if name == dtype_name)
        if sizes != shape:
            raise UserError(f"{self.paths[stored]}: {stored} has shape {sizes}, but {CONFIG} specifies {shape}")
        return Entry(shape, dtype, lambda: self._read(stored))

    def _read(self, stored: str) -> Tensor:
        if self._pickled:
            return self._pickled[stored].read()
        with _open_safetensors(self.paths[stored]) as file:
            tensor: Tensor = file.get_tensor(stored)
            return tensor


def _read_index(path: Path) -> dict[str, Path]:
    """Path of each tensor's file, from an index file."""
    index, files = Values(_read_json(path)), {}
    try:
        for name, file in index.table("weight_map").items():
            if not isinstance(file, str):
                raise UserError(f"weight_map names {file!r} as the file of {name}")
            if Path(file).name != file:
                raise UserError(f"{file!r} lies outside the folder")
            files[name] = path.parent / file
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return files


def _check_is_file(path: Path) -> None:
    if path.exists() and not path.is_file():  # a pipe would never end
        raise UserError(f"{path}: is not a file; fetch it again")


def _open_safetensors(path: Path) -> Any:
    _check_is_file(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _load_pickled(path: Path) -> dict[str, StoredTensor]:
    _check_is_file(path)
    file = TorchFile(path)
    if not isinstance(file.content, dict):
        raise UserError(f"{path}: holds a {type(file.content).__name__} instead of tensors by name")
    return {
        name: file.stored(name, tensor)
        for name, tensor in file.content.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


# Megatron-CC to Hugging Face


def write_hf(weights: Weights, folder: Path, advance: Callable[[int], object], shard_bytes: int = SHARD_BYTES) -> None:
    """Write a folder that ``transformers`` loads.

    Args:
        weights: weights of a model that a Hugging Face architecture supports.
        folder: an existing, empty folder.
        advance: called with the number of bytes of each tensor written.
        shard_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
        UserError: when there is no such architecture.
    """
    all_rules = list(rules(weights.model, weights.vocab_size))
    ids = special_ids(weights.tokenizer, weights.vocab_size)
    dtypes = {rule.ours: weights.entries[rule.ours].dtype for rule in all_rules}
    shards: list[list[Rule]] = [[]]
    size = 0
    for rule in all_rules:
        nbytes = torch.Size(rule.shape).numel() * dtypes[rule.ours].itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(rule)
        size += nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = [(theirs, shape, dtypes[rule.ours]) for rule in shard for theirs, shape in rule.theirs]
        file = SafetensorsFile(folder / name, tensors, {"format": "pt"})
        for rule in shard:
            tensor = weights.entries[rule.ours].read()
            for (theirs, _), view in zip(rule.theirs, rule.split(tensor), strict=True):
                file.add_tensor(theirs, view)
                places[theirs] = name
            advance(tensor.numel() * tensor.element_size())
        file.close()
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": weights.nbytes}, "weight_map": places})
    _write_json(folder / CONFIG, hf_config(weights.model, weights.vocab_size, dtypes[all_rules[0].ours], ids))
    copy_tokenizer(weights.tokenizer, folder)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

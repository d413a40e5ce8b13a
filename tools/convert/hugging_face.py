"""Hugging Face folders of GPT-2 and Llama models: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import functools
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.values import Values
from tools.convert.model import Entry, Weights, model_of
from tools.convert.names import Rule, architecture_of, rules
from tools.convert.pickles import unreadable
from tools.convert.safetensors_file import DTYPES, SafetensorsFile

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 << 30
_TOKENIZER_FILES = (
    "vocab.json", "merges.txt", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def is_hf(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return (folder / CONFIG).is_file()


# From Hugging Face


def read_hf(folder: Path) -> Weights:
    """A GPT-2 or Llama model.

    Raises:
        UserError: when it is another model, or a file is missing or damaged.
    """
    config = Values(_read_json(folder / CONFIG))
    try:
        kind = config.text("model_type")
        if kind not in ("gpt2", "llama"):
            raise UserError(f"model_type {kind!r} cannot be converted; only gpt2 and llama can")
        model = _gpt2_model(config) if kind == "gpt2" else _llama_model(config)
        vocab_size = config.integer("vocab_size")
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    stored = _StoredFiles(folder)
    entries = {}
    for rule in rules(model, vocab_size):
        parts = [stored.entry(name, shape) for name, shape in rule.theirs]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        entries[rule.ours] = Entry(rule.shape, dtype, _joined(rule, [part.to(dtype) for part in parts]))
    return Weights(model, vocab_size, entries, _tokenizer_of(folder))


def _joined(rule: Rule, parts: Sequence[Entry]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        return rule.join([part.read() for part in parts]).contiguous()

    return read


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


def _gpt2_model(config: Values) -> ModelConfig:
    activation = config.text("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast"):
        raise UserError(f"activation_function {activation!r} is none of ours (gelu_new, gelu); it cannot be converted")
    if not config.flag("scale_attn_weights", True) or config.flag("scale_attn_by_inverse_layer_idx", False):
        raise UserError("scale_attn_weights=false and scale_attn_by_inverse_layer_idx=true cannot be converted")
    hidden, positions = config.integer("n_embd"), config.integer("n_positions")
    return model_of(
        num_layers=config.integer("n_layer"),
        hidden_size=hidden,
        num_attention_heads=config.integer("n_head"),
        ffn_hidden_size=config.integer("n_inner", 4 * hidden),
        seq_length=positions,
        max_position_embeddings=positions,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        bias_gelu_fusion=activation != "gelu",
        untie_embeddings_and_output_weights=not config.flag("tie_word_embeddings", True),
        attention_dropout=config.number("attn_pdrop", 0.1),
        hidden_dropout=config.number("resid_pdrop", 0.1),
    )


def _llama_model(config: Values) -> ModelConfig:
    if config.flag("attention_bias", False) or config.flag("mlp_bias", False):
        raise UserError("attention_bias and mlp_bias cannot be converted: our RMSNorm models have no biases there")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act {activation!r} cannot be converted; only silu can")
    rope = Values(config.table("rope_parameters", {}) or config.table("rope_scaling", {}))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind != "default":
        raise UserError(f"rope scaling of type {kind!r} cannot be converted: our rotary embeddings are not scaled")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    positions = config.integer("max_position_embeddings")
    return model_of(
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=config.integer("num_key_value_heads", heads),
        kv_channels=config.integer("head_dim", max(hidden // heads, 1)),
        ffn_hidden_size=config.integer("intermediate_size"),
        seq_length=positions,
        max_position_embeddings=positions,
        position_embedding_type="rope",
        rotary_base=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
        normalization="RMSNorm",
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not config.flag("tie_word_embeddings", False),
        attention_dropout=config.number("attention_dropout", 0.0),
        hidden_dropout=0.0,
    )


def _tokenizer_of(folder: Path) -> TokenizerConfig:
    """The tokenizer whose files lie in the folder, if any do."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab.resolve()), merge_file=str(merges.resolve())
        )
    if (folder / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder.resolve()))
    if (folder / "tokenizer.model").is_file():
        model = str((folder / "tokenizer.model").resolve())
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    return TokenizerConfig()


class _StoredFiles:
    """The tensors of a folder: of safetensors files, or of one ``pytorch_model.bin``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin: dict[str, Tensor] = {}
        self.places: dict[str, Path] = {}
        if (folder / INDEX).is_file():
            self.places = _places(folder)
        elif (folder / SINGLE).is_file():
            with _opened(folder / SINGLE) as file:
                self.places = dict.fromkeys(file.keys(), folder / SINGLE)
        elif (folder / "pytorch_model.bin").is_file():
            self._bin = _load_bin(folder / "pytorch_model.bin")
            self.places = dict.fromkeys(self._bin, folder / "pytorch_model.bin")
        else:
            raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX} nor pytorch_model.bin")

    def _name(self, name: str) -> str:
        """GPT-2's own files leave the first word out."""
        short = name.removeprefix("transformer.")
        return short if name not in self.places and short in self.places else name

    def entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        """A tensor that must be there in a shape."""
        stored = self._name(name)
        if stored not in self.places:
            raise UserError(f"{self.folder}: there is no tensor {name}; the files are incomplete, or of another model")
        if self._bin:
            found, dtype = tuple(self._bin[stored].shape), self._bin[stored].dtype
        else:
            with _opened(self.places[stored]) as file:
                if stored not in file.keys():  # noqa: SIM118  # no mapping
                    raise UserError(f"{self.places[stored]} does not hold {stored}, which {INDEX} says it does")
                part = file.get_slice(stored)
                found, dtype = tuple(part.get_shape()), _dtype_of(part.get_dtype(), f"{self.places[stored]}: {stored}")
        if found != shape:
            raise UserError(f"{self.places[stored]}: {stored} has shape {found}, {CONFIG} asks for {shape}")
        return Entry(shape, dtype, lambda: self._read(stored))

    def _read(self, stored: str) -> Tensor:
        if self._bin:
            return self._bin[stored]
        with _opened(self.places[stored]) as file:
            tensor: Tensor = file.get_tensor(stored)
            return tensor


def _places(folder: Path) -> dict[str, Path]:
    """Each tensor's file, as the index says."""
    index, found = Values(_read_json(folder / INDEX)), {}
    try:
        for name, file in index.table("weight_map").items():
            if not isinstance(file, str):
                raise UserError(f"weight_map names {file!r} as the file of {name}")
            if Path(file).name != file:
                raise UserError(f"{file!r} lies outside the folder")
            found[name] = folder / file
    except UserError as error:
        raise UserError(f"{folder / INDEX}: {error}") from error
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _dtype_of(name: str, where: str) -> torch.dtype:
    for dtype, known in DTYPES.items():
        if known == name:
            return dtype
    raise UserError(f"{where} is of type {name}, which cannot be converted")


def _load_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch's; those of before torch 1.6, which are no archives, are read into memory."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds for files that are none of its own
        raise unreadable(path, error) from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: holds a {type(loaded).__name__} instead of tensors by name")
    return {
        name: tensor.detach()
        for name, tensor in loaded.items()
        if isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
    }


# To Hugging Face


def write_hf(weights: Weights, folder: Path, done: Callable[[int], None], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a folder that ``transformers`` loads.

    Args:
        weights: of a model that is GPT-2's or Llama's kind.
        folder: an existing, empty folder.
        done: called with the bytes of each tensor that was written.
        shard_bytes: of the largest file, where a single tensor is not larger.

    Raises:
        UserError: when there is no such architecture.
    """
    planned = list(rules(weights.model, weights.vocab_size))
    dtypes = {rule.ours: weights.entries[rule.ours].dtype for rule in planned}
    shards = _shards(planned, dtypes, shard_bytes)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = [(theirs, shape, dtypes[rule.ours]) for rule in shard for theirs, shape in rule.theirs]
        file = SafetensorsFile(folder / name, tensors, {"format": "pt"})
        for rule in shard:
            whole = weights.entries[rule.ours].read()
            for (theirs, _), view in zip(rule.theirs, rule.split(whole), strict=True):
                file.add(theirs, view)
                places[theirs] = name
            done(whole.numel() * whole.element_size())
        file.close()
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": weights.nbytes}, "weight_map": places})
    _write_json(folder / CONFIG, hf_config(weights.model, weights.vocab_size, dtypes[planned[0].ours]))
    _copy_tokenizer(weights.tokenizer, folder)


def _shards(planned: Sequence[Rule], dtypes: Mapping[str, torch.dtype], limit: int) -> list[list[Rule]]:
    shards: list[list[Rule]] = [[]]
    size = 0
    for rule in planned:
        nbytes = torch.Size(rule.shape).numel() * dtypes[rule.ours].itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(rule)
        size += nbytes
    return shards


def hf_config(model: ModelConfig, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json."""
    tied = not model.untie_embeddings_and_output_weights
    common = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "torch_dtype": _DTYPE_NAMES.get(dtype, "float32")}
    if architecture_of(model) == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "n_positions": model.max_position_embeddings,
            "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
            "layer_norm_epsilon": model.norm_epsilon,
            "attn_pdrop": model.attention_dropout,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "bos_token_id": vocab_size - 1,
            "eos_token_id": vocab_size - 1,
        }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rotary_base,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> None:
    """Copies the tokenizer's files under the names that ``transformers`` looks for."""
    named = {"vocab.json": tokenizer.vocab_file, "merges.txt": tokenizer.merge_file}
    model = Path(tokenizer.tokenizer_model) if tokenizer.tokenizer_model else None
    if model is not None and model.is_dir():
        named |= {name: str(model / name) for name in _TOKENIZER_FILES if (model / name).is_file()}
    elif model is not None:
        named["tokenizer.model"] = str(model)
    for name, source in named.items():
        if not source:
            continue
        if not Path(source).is_file():
            raise UserError(
                f"{source}: the tokenizer's file is gone; put it back, or convert without it (--no-tokenizer)"
            )
        shutil.copyfile(source, folder / name)
    if tokenizer.tokenizer_type == "GPT2BPETokenizer":
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})

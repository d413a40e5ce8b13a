"""Malformed files of other programs: one line each, and nothing is cut or changed silently."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.convert.classic import find_classic
from megatron.convert.hugging_face import read_hf
from megatron.convert.ours import read_ours
from tests.unit.convert.support import (
    EXPERTS,
    GEMMA,
    GEMMA3,
    LLAMA,
    SHARED,
    assert_same_weights,
    change_json,
    convert,
    refusal,
    saved_model,
)

FILE = "model_optim_rng.pt"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of ours by model type, and Hugging Face's formats of them."""
    root = tmp_path_factory.mktemp("models")
    gemma3 = {**GEMMA3, "rope_local_base_freq": 50.0}
    kinds = {"gpt2": {}, "llama": LLAMA, "mixtral": EXPERTS, "qwen2_moe": SHARED, "gemma2": GEMMA, "gemma3": gemma3}
    for kind, model in kinds.items():
        convert(saved_model(root / kind, model), root / f"{kind} hf", "hf")
    return {path.name: path for path in root.iterdir()}


# Hugging Face


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gpt2", {"n_embd": "32"}, "n_embd: '32' is not an integer"),
        ("gpt2", {"vocab_size": 50257.0}, "vocab_size: 50257.0 is not an integer"),
        ("gpt2", {"n_head": 4.0}, "n_head: 4.0 is not an integer"),
        ("gpt2", {"n_head": 0}, "n_head is 0; it must be at least 1"),
        ("gpt2", {"n_head": True}, "n_head: true is not an integer"),
        ("gpt2", {"n_embd": 10**30}, "n_embd: 1000000000000000000000000000000 is too large an integer"),
        ("gpt2", {"n_layer": None}, "n_layer is missing"),
        ("gpt2", {"n_inner": [1]}, "n_inner: expected an integer, not a list"),
        ("gpt2", {"n_head": 5}, "--hidden-size 32 is not a multiple of --num-attention-heads 5"),
        ("gpt2", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon: nan is not a finite number"),
        ("gpt2", {"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false' is neither true nor false"),
        ("gpt2", {"activation_function": ["gelu"]}, "activation_function: expected text, not a list"),
        ("gpt2", {"model_type": 3}, "model_type: 3 is not text"),
        ("llama", {"rope_theta": 10**400}, "rope_theta: a number of 1329 bits is too large a number"),
        ("llama", {"rope_theta": "x"}, "rope_theta: 'x' is not a number"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling: expected names and values, not 'linear'"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling: expected names and values, not a list"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, "rope scaling of type 'dynamic' cannot be converted"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "--rotary-scaling-factor is 0.5; it must be"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 cannot be converted"),
        ("llama", {"mlp_bias": True}, "attention_bias and mlp_bias differ"),
        ("llama", {"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "layer_types must name"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' cannot be converted"),
        ("gemma2", {"attention_bias": True}, "attention_bias=true cannot be converted"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true cannot be converted"),
        ("gemma2", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "--attn-logit-softcapping is 0.0; it must be above 0"),
        ("gemma2", {"query_pre_attn_scalar": 0.5}, "query_pre_attn_scalar: 0.5 is not an integer"),
        ("gemma2", {"rope_scaling": {"type": "dynamic"}}, "rope scaling of type 'dynamic' cannot be converted"),
        ("gemma2", {"model_type": "gemma3"}, "text_config is missing"),
        ("gemma2", {"model_type": "gemma3", "text_config": [1]}, "text_config: expected names and values, not a list"),
        ("gemma2", {"model_type": "gemma3n"}, "model_type 'gemma3n' cannot be converted"),
        ("gemma3", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping cannot be converted: transformers does"),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters must be those of full_attention and"),
        ("gemma3", {"rope_parameters": {"full_attention": 5}}, "full_attention: expected names and values, not 5"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope scaling of type 'linear' of sliding_attention cannot be converted",
        ),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be"),
        ("llama", {"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must name"),
        ("llama", {"model_type": "qwen2", "layer_types": "full_attention"}, "layer_types: expected a list, not '"),
        ("llama", {"model_type": "gpt_neox", "attention_bias": False}, "attention_bias=false cannot be converted"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ("mixtral", {"num_local_experts": 1}, "num_local_experts is 1; it must be at least 2"),
        ("mixtral", {"num_experts_per_tok": 5}, "--moe-router-topk 5 is above the 4 experts of a layer"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with weights that sum to 1 cannot be converted"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be converted"),
        ("mixtral", {"router_jitter_noise": 1.5}, "--moe-input-jitter-eps is 1.5; it must be"),
        ("mixtral", {"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1; it must be at least 0"),
        ("mixtral", {"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' cannot be converted"),
        ("qwen2_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with weights that sum to 1 cannot be"),
        (
            "qwen2_moe",
            {"decoder_sparse_step": 4},
            "decoder_sparse_step and mlp_only_layers leave no layer with experts",
        ),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "decoder_sparse_step and mlp_only_layers leave no layer with"),
        ("qwen2_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers: 'a' is not an integer"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers: expected a list, not 1"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be at least 1"),
        ("qwen2_moe", {"num_hidden_layers": 4000, "layer_types": None}, "num_hidden_layers is 4_000; it must be at"),
        (
            "llama",
            {"model_type": "qwen2", "num_hidden_layers": 10**9, "use_sliding_window": True},
            "num_hidden_layers is 1_000_000_000; it must be at",
        ),
        ("llama", {"attention_bias": "no"}, "attention_bias: 'no' is neither true nor false"),
    ],
)
def test_a_malformed_configuration_is_refused(
    kind: str,
    change: dict[str, Any],
    message: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(models[f"{kind} hf"], tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", change)
    line = refusal(capsys, tmp_path / "hf", tmp_path / "out", "megatron-cc")
    assert f"{tmp_path / 'hf' / 'config.json'}: {message}" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 3}, "mlp.gate.weight has shape (4, 32), but config.json specifies (3, 32)"),
        ({"num_experts": 5}, "mlp.gate.weight has shape (4, 32), but config.json specifies (5, 32)"),
        (
            {"moe_intermediate_size": 25},
            "gate_proj.weight has shape (24, 32), but config.json specifies (25, 32)",
        ),
        ({"mlp_only_layers": [2]}, "there is no tensor model.layers.2.mlp.gate_proj.weight"),
        ({"num_hidden_layers": 2, "layer_types": None}, "has no place in the model that config.json describes"),
    ],
)
def test_experts_that_contradict_the_configuration_are_refused(
    change: dict[str, Any], message: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models["qwen2_moe hf"], tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", change)
    assert message in refusal(capsys, tmp_path / "hf", tmp_path / "out", "megatron-cc")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "weight_map is missing"),
        (["a"], "weight_map: expected names and values, not a list"),
        ({"transformer.wte.weight": 3}, "weight_map names 3 as the file of transformer.wte.weight"),
        ({"transformer.wte.weight": "../x"}, "'../x' lies outside the folder"),
    ],
)
def test_a_malformed_index_is_refused(
    weight_map: Any, message: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models["gpt2 hf"], tmp_path / "hf")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert f"{index}: {message}" in refusal(capsys, tmp_path / "hf", tmp_path / "out", "megatron-cc")


def test_a_shard_that_is_a_pipe_is_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models["gpt2 hf"], tmp_path / "hf")
    names = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "p")}))
    os.mkfifo(tmp_path / "hf" / "p")
    assert f"{tmp_path / 'hf' / 'p'}: is not a file" in refusal(
        capsys, tmp_path / "hf", tmp_path / "out", "megatron-cc"
    )


def _as_bin(folder: Path, change: Callable[[dict[str, Any]], Any], **how: Any) -> Path:
    weights = folder / "model.safetensors"
    path = folder / "pytorch_model.bin"
    torch.save(change(load_file(weights)), path, **how)
    weights.unlink()
    return path


def test_files_from_before_torch_1_6_are_read(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["gpt2 hf"], tmp_path / "hf")
    _as_bin(tmp_path / "hf", dict, _use_new_zipfile_serialization=False)
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(models["gpt2"]), read_ours(tmp_path / "back"))


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("how", ["list", "code", "junk", "int64"])
def test_torch_files_without_weights_are_refused(
    how: str, archive: bool, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models["gpt2 hf"], tmp_path / "hf")
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "list": lambda tensors: list(tensors.values()),
        "code": lambda tensors: tensors | {"x": _Evil()},
        "junk": dict,
        "int64": lambda tensors: {name: tensor.long() for name, tensor in tensors.items()},
    }
    path = _as_bin(tmp_path / "hf", changes[how], _use_new_zipfile_serialization=archive)
    if how == "junk":
        path.write_bytes(path.read_bytes()[:1000] if archive else b"junk" * 100)
    line = refusal(capsys, tmp_path / "hf", tmp_path / "out", "megatron-cc")
    messages = {
        "list": f"{path}: holds a list instead of tensors by name",
        "code": f"{path}: cannot be read safely: it names print",
        "junk": f"{path}: cannot be read safely: it is damaged",
        "int64": "holds int64, which is not a type of weights",
    }
    assert messages[how] in line
    assert "weights_only" not in line


@pytest.mark.parametrize("half", ["the embedding", "all else"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("to", ["classic", "megatron-cc", "hf"])
def test_mixed_precision_stays_as_it_is(half: str, kind: str, to: str, models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models[f"{kind} hf"], tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {
        name: tensor.bfloat16() if (".wte." in name or "embed_tokens" in name) == (half == "the embedding") else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    sizes = ["--target-tensor-model-parallel-size", "2", "--target-pipeline-model-parallel-size", "3"]
    convert(tmp_path / "hf", tmp_path / "out", to, *(sizes if to == "classic" else []))
    if to == "classic":
        convert(tmp_path / "out", tmp_path / "back", "megatron-cc")
    result = {"classic": tmp_path / "back", "megatron-cc": tmp_path / "out"}.get(to)
    first = read_hf(tmp_path / "hf")
    second = read_hf(tmp_path / "out") if result is None else read_ours(result)
    for name, entry in first.entries.items():
        assert second.entries[name].dtype == entry.dtype
        assert torch.equal(entry.read(), second.entries[name].read()), name


# Classic


def _classic(saved: Path, folder: Path, tp: int = 1, pp: int = 1) -> list[Path]:
    """The files of a classic checkpoint."""
    sizes = ["--target-tensor-model-parallel-size", str(tp), "--target-pipeline-model-parallel-size", str(pp)]
    convert(saved, folder, "classic", *sizes)
    return sorted(folder.rglob(FILE))


def _change(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: setattr(content["args"], name, value)


def _encoder(content: dict[str, Any]) -> dict[Any, Any]:
    encoder: dict[Any, Any] = content["model"]["language_model"]["encoder"]
    return encoder


QKV = "layers.0.self_attention.query_key_value.weight"


def _smaller_projection(content: dict[str, Any]) -> None:
    content["checkpoint_version"] = 0
    _encoder(content)[QKV] = _encoder(content)[QKV][:-1].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(checkpoint_version="x"), "checkpoint_version: 'x' is not a number"),
        (lambda c: c.update(checkpoint_version=9.0), "checkpoint_version 9 is not known; 0, 1, 2, 3 are"),
        (lambda c: c.update(iteration="abc"), "iteration: 'abc' is not an integer"),
        (lambda c: c.update(model=3), "model is not there, or holds no tensors by name"),
        (_set("rotary_interleaved", True), "rotary_interleaved cannot be converted"),
        (_set("position_embedding_type", "alibi"), "position_embedding_type 'alibi' cannot be converted"),
        (
            lambda c: _encoder(c).update({"layers.1.self_attention.q_layernorm.weight": torch.ones(8)}),
            "layers.1.self_attention.q_layernorm.weight has no place in a model of its arguments",
        ),
        (_set("layernorm_epsilon", 10**400), "layernorm_epsilon: a number of 1329 bits is too large a number"),
        (_set("num_attention_heads", 4.0), "num_attention_heads: 4.0 is not an integer"),
        (_set("swiglu", "no"), "swiglu: 'no' is neither true nor false"),
        (_set("hidden_size", 48), "has shape (128, 32), but its arguments specify (128, 48)"),
        (
            lambda c: vars(c["args"]).update(padded_vocab_size=5, orig_vocab_size=None),
            "has shape (128, 32), but its arguments specify (5, 32)",
        ),
        (_set("padded_vocab_size", 5), "entries and its embedding 5 rows by the arguments"),
        (_set("orig_vocab_size", 7), "the vocabulary has 7 entries and its embedding 128 rows by the arguments"),
        (_set("padded_vocab_size", None), "padded_vocab_size is missing"),
        (
            lambda c: vars(c["args"]).update(max_position_embeddings=8, seq_length=8),
            "has shape (16, 32), but its arguments specify (8, 32)",
        ),
        (_smaller_projection, f"{QKV} has shape (95, 32), but its arguments specify (96, 32)"),
        (
            lambda c: _encoder(c).update({"final_layernorm.weight": torch.ones(32, dtype=torch.int64)}),
            "final_layernorm.weight holds int64, which is not a type of weights",
        ),
    ],
)
def test_a_malformed_classic_file_is_refused(
    change: Callable[[dict[str, Any]], Any],
    message: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (path,) = _classic(models["gpt2"], tmp_path / "classic")
    _change(path, change)
    line = refusal(capsys, tmp_path / "classic", tmp_path / "out", "megatron-cc")
    assert message in line
    assert str(tmp_path / "classic") in line


def test_names_that_are_not_text_are_ignored(models: dict[str, Path], tmp_path: Path) -> None:
    (path,) = _classic(models["gpt2"], tmp_path / "classic")
    _change(path, lambda content: _encoder(content).__setitem__(3, torch.ones(1)))
    convert(tmp_path / "classic", tmp_path / "back", "megatron-cc")
    assert read_ours(tmp_path / "back", None).entries.keys() == read_ours(models["gpt2"], None).entries.keys()


def test_ranks_that_do_not_match_are_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = _classic(models["gpt2"], tmp_path / "stages" / "classic", pp=3)
    _change(stages[1], lambda content: content.update(model0=content.pop("model")))
    assert f"{stages[1]}: model is not there" in refusal(
        capsys, tmp_path / "stages" / "classic", tmp_path / "out", "megatron-cc"
    )
    shards = _classic(models["gpt2"], tmp_path / "parts" / "classic", tp=2)
    _change(shards[1], lambda content: _encoder(content).update({QKV: _encoder(content)[QKV].bfloat16()}))
    line = refusal(capsys, tmp_path / "parts" / "classic", tmp_path / "out", "megatron-cc")
    assert re.search(rf"{re.escape(str(shards[1]))}: {re.escape(QKV)} is torch.bfloat16, another rank's part", line)


@pytest.mark.parametrize("text", ["²", "٣", "-1", "x"])
def test_a_tracker_of_a_missing_checkpoint_is_refused(
    text: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _classic(models["gpt2"], tmp_path / "classic")
    (tmp_path / "classic" / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    assert find_classic(tmp_path / "classic") is None
    assert "instead of an iteration" in refusal(capsys, tmp_path / "classic", tmp_path / "out", "megatron-cc")

"""Our models as Hugging Face folders and back: logits, every tensor, and errors about bad files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.checkpoint.load
from megatron.config.model import ModelConfig
from megatron.convert.hugging_face import read_hf, write_hf
from megatron.convert.ours import read_ours
from tests.support.combinations import mark_repeats
from tests.support.tiny import VOCAB
from tests.unit.convert.support import (
    EXPERTS,
    GEMMA,
    HEADS,
    HIDDEN,
    LENGTH,
    LLAMA,
    MODELS,
    NOT_CLASSIC,
    SHARED,
    TOKENS_BS,
    WITH_EXPERTS,
    assert_close,
    assert_same_weights,
    change_json,
    convert,
    load_theirs,
    our_logits,
    randomize,
    refusal,
    saved_model,
)
from tests.unit.convert.theirs import THEIRS

ALL = MODELS | NOT_CLASSIC | WITH_EXPERTS
EACH_FIELD = [
    *("gpt2", "gpt2 untied, exact gelu", "llama, 2 groups, untied", "llama, wide heads", "llama with biases"),
    *("neox, half rotated, exact gelu, untied", "neox, side by side"),
    *("qwen2, yarn with fractions", "qwen2 with a window", "qwen2, windows in some layers", "llama 3, short"),
    *("mistral", "ministral", "qwen3, 2 groups, with a window"),
    *("gemma2", "gemma2 without bounds, all layers with a window, untied"),
    *("gemma3", "gemma3, bounded logits, one base, last layer with a window", "gemma3 without windows, scaled"),
    *("mixtral", "qwen2-moe", "qwen2-moe, weights that sum to 1, no biases, first layer dense"),
    "qwen3-moe, weights of all, every other layer, with a window, untied",
]
"""Models that have each architecture and each field of config.json between them."""


@pytest.mark.parametrize("name", mark_repeats(ALL, EACH_FIELD))
def test_exported_and_imported_models_have_our_logits(name: str, tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "ours", ALL[name])
    convert(saved, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    ours, theirs = our_logits(saved), load_theirs("AutoModelForCausalLM", tmp_path / "hf")
    with torch.no_grad():
        assert_close(theirs(input_ids=TOKENS_BS).logits, ours)
    assert torch.equal(our_logits(tmp_path / "back"), ours)
    first, second = read_ours(saved), read_ours(tmp_path / "back")
    assert_same_weights(first, second)
    assert replace(first.model, hidden_dropout=0.0) == replace(second.model, **_not_in_a_config(first.model))


def _not_in_a_config(model: ModelConfig) -> dict[str, Any]:
    """Fields that config.json lacks and that change no number."""
    return {
        "bias_gelu_fusion": model.bias_gelu_fusion,
        "hidden_dropout": 0.0,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_eval_capacity_factor": model.moe_eval_capacity_factor,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "init_method_std": model.init_method_std,
        "seq_length": model.seq_length,
    }


# The others differ from these in numbers, or in a field that another architecture has, too.
REPEATED_THEIRS = {
    *("llama, 2 groups", "mistral", "mixtral", "qwen2", "qwen3, sliding", "qwen3-moe", "qwen2-moe"),
    *("gemma2", "qwen3, whose layers are named one by one", "llama, yarn"),
}


@pytest.mark.parametrize("name", mark_repeats(THEIRS, THEIRS.keys() - REPEATED_THEIRS))
def test_their_models_come_in(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    kind, changes = THEIRS[name]
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        sizes |= {"n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS}
    else:
        sizes |= {
            "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
        }  # fmt: skip
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes}))
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    with torch.no_grad():
        assert_close(our_logits(tmp_path / "ours"), theirs.eval()(input_ids=TOKENS_BS).logits)


def test_the_older_name_of_rope_scaling_counts_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = saved_model(tmp_path / "ours", {**LLAMA, "rotary_scaling": "linear", "rotary_scaling_factor": 3.0})
    convert(saved, tmp_path / "hf", "hf")
    plain = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    change_json(tmp_path / "hf" / "config.json", plain)
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert_close(our_logits(tmp_path / "back"), theirs(input_ids=TOKENS_BS).logits)


def test_a_mistral_with_layer_types_is_a_ministral_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(saved_model(tmp_path / "ours", NOT_CLASSIC["ministral"]), tmp_path / "hf", "hf")
    change_json(tmp_path / "hf" / "config.json", {"model_type": "mistral"})
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")).__name__ == "MinistralForCausalLM"
    assert read_hf(tmp_path / "hf").model.window_attn_skip_freq == [1, 1, 0]


def test_several_files_and_half_precision(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = read_ours(saved_model(tmp_path / "ours", {}, {"bf16": True}))
    (tmp_path / "hf").mkdir()
    write_hf(weights, tmp_path / "hf", lambda nbytes: None, shard_bytes=10_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    embedding = weights.entries["embedding.word_embeddings.weight"].read()
    assert torch.equal(theirs.transformer.wte.weight.detach(), embedding)
    back = read_hf(tmp_path / "hf")
    assert all(torch.equal(back.entries[name].read(), weights.entries[name].read()) for name in weights.entries)


def test_precision_is_converted(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "ours", {})
    convert(saved, tmp_path / "half", "hf", "--dtype", "bf16")
    half, full = read_hf(tmp_path / "half"), read_ours(saved)
    name = "layers.1.mlp.dense_h_to_4h.weight"
    assert torch.equal(half.entries[name].read(), full.entries[name].read().bfloat16())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_old_files_of_torch_come_in(tmp_path: Path) -> None:
    """GPT-2's first release: no safetensors, names without their first word, and masks among the weights."""
    saved = saved_model(tmp_path / "ours", {})
    convert(saved, tmp_path / "hf", "hf")
    from safetensors.torch import load_file

    tensors = {n.removeprefix("transformer."): t for n, t in load_file(tmp_path / "hf" / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH)
    torch.save(tensors, tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "model.safetensors").unlink()
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))


def test_a_checkpoint_from_before_yarn_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration lacks numbers that now have a default."""
    flags = {**LLAMA, "rotary_scaling": "llama3", "rotary_base": 20.0, "rotary_scaling_original_length": 24}
    saved = saved_model(tmp_path / "ours", flags)
    expected, read = our_logits(saved), megatron.checkpoint.load.load_config_yaml

    def without(*keys: Any) -> str:
        lines = read(*keys).splitlines()
        return "\n".join(line for line in lines if "attention_factor" not in line and "round_to_int" not in line)

    monkeypatch.setattr(megatron.checkpoint.load, "load_config_yaml", without)
    assert torch.equal(our_logits(saved), expected)


def test_several_files_of_torch_come_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    saved = saved_model(tmp_path / "ours", {})
    convert(saved, tmp_path / "hf", "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    files = [f"pytorch_model-{number:05d}-of-00003.bin" for number in (1, 2, 3)]
    places = {name: files[number % 3] for number, name in enumerate(tensors)}
    for file in files:
        torch.save({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / "hf" / file)
    index = tmp_path / "hf" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))
    name = next(iter(places))
    for change, message in (
        ({name: files[1]}, f"{files[1]} does not hold {name}, although pytorch_model.bin.index.json lists it"),
        ({name: "gone.bin"}, "gone.bin: No such file"),
        ({name: "../hf/x.bin"}, "'../hf/x.bin' lies outside the folder"),
    ):
        index.write_text(json.dumps({"weight_map": places | change}))
        assert message in refusal(capsys, tmp_path / "hf", tmp_path / "x", "megatron-cc")
    index.write_text(json.dumps({"weight_map": places}))
    torch.save({name: torch.nn.Linear(1, 1)}, tmp_path / "hf" / places[name])
    assert "cannot be read safely" in refusal(capsys, tmp_path / "hf", tmp_path / "x", "megatron-cc")


def test_a_tied_head_with_other_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    convert(saved_model(tmp_path / "ours", {}), tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, file)
    convert(tmp_path / "hf", tmp_path / "same", "megatron-cc")
    tensors["lm_head.weight"][3, 2] += 1
    save_file(tensors, file)
    assert "lm_head.weight differs from the embedding, although config.json ties both; write" in refusal(
        capsys, tmp_path / "hf", tmp_path / "x", "megatron-cc"
    )
    change_json(tmp_path / "hf" / "config.json", {"tie_word_embeddings": False})
    convert(tmp_path / "hf", tmp_path / "untied", "megatron-cc")
    assert torch.equal(read_ours(tmp_path / "untied").entries["output_layer.weight"].read(), tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 64}, "config.json specifies"),
        ({"model_type": "bert"}, "model_type 'bert' cannot be converted"),
        ({"n_layer": 4}, "there is no tensor transformer.h.3.ln_1.weight"),
        ({"n_layer": 2}, "transformer.h.2.attn.c_attn.bias has no place in the model that config.json describes"),
        (lambda folder: os.truncate(folder / "model.safetensors", 9000), "model.safetensors: cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), " is missing"),
    ],
)
def test_errors_in_a_folder_are_named(
    change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(saved_model(tmp_path / "ours", {}), tmp_path / "hf", "hf")
    if callable(change):
        change(tmp_path / "hf")
    else:
        change_json(tmp_path / "hf" / "config.json", change)
    assert message in refusal(capsys, tmp_path / "hf", tmp_path / "back", "megatron-cc")


def test_biases_of_experts_stay_in_our_own_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", {**EXPERTS, "moe_router_enable_expert_bias": True})
    convert(saved, tmp_path / "half", "megatron-cc", "--dtype", "bf16")
    assert read_ours(tmp_path / "half").entries["layers.2.mlp.router.expert_bias"].shape == (4,)
    for to, message in (
        ("hf", "has no --moe-router-enable-expert-bias"),
        ("classic", "that layout has no --num-experts"),
    ):
        assert message in refusal(capsys, saved, tmp_path / to, to)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"swiglu": True, "ffn_hidden_size": 48}, "closest to GPT-2, which has no --swiglu"),
        ({**LLAMA, "rotary_percent": 0.5}, "closest to Llama, which has --rotary-percent 1"),
        ({"num_experts": [4]}, "closest to GPT-2, which has no --num-experts"),
        (
            {**EXPERTS, "moe_router_score_function": "sigmoid"},
            "closest to Mixtral, which has --moe-router-score-function softmax",
        ),
        ({**EXPERTS, "moe_router_topk": 1}, "closest to Mixtral, which has --moe-router-topk of at least 2"),
        ({**EXPERTS, "moe_router_pre_softmax": True}, "closest to Mixtral, which has no --moe-router-pre-softmax"),
        (
            {**EXPERTS, "moe_router_topk_scaling_factor": 2.0},
            "closest to Mixtral, which has --moe-router-topk-scaling-factor 1",
        ),
        (
            {**EXPERTS, "moe_expert_capacity_factor": 1.9},
            "closest to Mixtral, which has no --moe-eval-capacity-factor below 4 / 2, which drops tokens; keep",
        ),
        ({**EXPERTS, "num_experts": [1, 4, 4]}, "closest to Mixtral, which has experts in all layers"),
        ({**SHARED, "num_experts": [2, 4, 4]}, "closest to Qwen2Moe, which has the same number of experts in every"),
        ({**GEMMA, "sandwich_norm": False}, "closest to Gemma2, which has --sandwich-norm"),
        ({**GEMMA, "kv_channels": 8, "num_attention_heads": 5}, "closest to Gemma2, which has a --hidden-size"),
        ({**GEMMA, "qk_layernorm": True, "attn_logit_softcapping": 3.0}, "closest to Gemma2, which has no --qk"),
        ({**GEMMA, "qk_layernorm": True, "rotary_scaling": "linear"}, "closest to Gemma2, which has no --qk-"),
        ({**LLAMA, "final_logit_softcapping": 3.0}, "closest to Llama, which has no --final-logit-softcapping"),
        ({**LLAMA, "attn_logit_softcapping": 3.0}, "closest to Llama, which has no --attn-logit-softcapping"),
        ({**LLAMA, "query_pre_attn_scalar": 3}, "closest to Llama, which has no --query-pre-attn-scalar"),
        ({**LLAMA, "apply_layernorm_1p": True}, "closest to Llama, which has no --apply-layernorm-1p"),
        ({**LLAMA, "apply_embedding_scaling": True}, "closest to Llama, which has no --apply-embedding-scaling"),
        ({"apply_layernorm_1p": True}, "closest to GPT-2, which has no --apply-layernorm-1p"),
        ({**SHARED, "moe_shared_expert_gate": False}, "closest to Mixtral, which has no --moe-shared-expert"),
    ],
)
def test_models_without_a_hugging_face_architecture_are_refused(
    model: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = saved_model(tmp_path / "ours", model)
    assert message in refusal(capsys, saved, tmp_path / "hf", "hf")
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", {})
    shard = saved / "iter_0000007" / "shard_00000.bin"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "do not match their checksum" in refusal(capsys, saved, tmp_path / "hf", "hf")


def test_existing_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", {})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("mine")
    assert "is not empty" in refusal(capsys, saved, tmp_path / "hf", "hf")
    assert "holds neither a checkpoint" in refusal(capsys, tmp_path, tmp_path / "x", "hf")
    assert "there is no such folder" in refusal(capsys, tmp_path / "missing", tmp_path / "x", "hf")

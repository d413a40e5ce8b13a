"""Small random models as checkpoints."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.model_state import model_tensors
from megatron.checkpoint.save import save_checkpoint
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.command import main
from megatron.convert.model import Weights
from megatron.inference.model import load_model
from megatron.models.context import ForwardContext
from tests.support.tiny import VOCAB, tiny_engines

LENGTH, HIDDEN, HEADS = 16, 32, 4
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 48,
    "add_bias_linear": False,
}  # fmt: skip
UNTIED = {"untie_embeddings_and_output_weights": True}
ROPE = {"position_embedding_type": "rope"}
QWEN2 = {**LLAMA, "add_qkv_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 untied, exact gelu": {**UNTIED, "bias_gelu_fusion": False},
    "llama, 1 group": {**LLAMA, "num_query_groups": 1},
    "llama, 2 groups, untied": {**LLAMA, **UNTIED, "num_query_groups": 2},
    "llama, wide heads": {**LLAMA, "kv_channels": 16, "rotary_base": 5000.0},
    "llama with biases": {**LLAMA, "add_bias_linear": True, "num_query_groups": 2},
    "llama, all wavelengths scaled": {**LLAMA, "rotary_scaling": "linear", "rotary_scaling_factor": 3.0},
    "llama 3": {**LLAMA, "rotary_scaling": "llama3", "rotary_scaling_factor": 32.0, "rotary_base": 5e4},
    "qwen2, 2 groups, untied": {**QWEN2, **UNTIED, "num_query_groups": 2},
    "neox": ROPE,
    "neox, half rotated, exact gelu, untied": {**ROPE, **UNTIED, "rotary_percent": 0.5, "bias_gelu_fusion": False},
}
GEMMA = {
    **{name: value for name, value in LLAMA.items() if name != "swiglu"}, "geglu": True, "apply_layernorm_1p": True,
    "sandwich_norm": True, "apply_embedding_scaling": True, "sliding_window": 5,
}  # fmt: skip
GEMMA3 = {**GEMMA, "qk_layernorm": True}
SCALED = {"rotary_scaling": "linear", "rotary_scaling_factor": 2.5}
YARN = {"rotary_scaling": "yarn", "rotary_base": 50.0, "rotary_scaling_original_length": 24}
NOT_CLASSIC: dict[str, dict[str, Any]] = {
    "llama, yarn": {**LLAMA, **YARN, "rotary_scaling_high_turns": 3.0},
    "qwen2, yarn with fractions": {
        **QWEN2, **YARN, "kv_channels": 24, "rotary_base": 900.0, "rotary_scaling_factor": 3.5,
        "rotary_scaling_low_turns": 0.4, "rotary_scaling_attention_factor": 1.25,
        "yarn_correction_range_round_to_int": False,
    },
    "llama 3, short": {
        **LLAMA, "rotary_base": 20.0, "rotary_scaling": "llama3", "rotary_scaling_original_length": 24,
        "rotary_scaling_high_turns": 3.0,
    },
    "mistral": {**LLAMA, "num_query_groups": 2, "sliding_window": 5},
    "qwen2 with a window": {**QWEN2, **UNTIED, **SCALED, "num_query_groups": 2, "sliding_window": 3},
    "qwen3, 2 groups, with a window": {
        **LLAMA, "qk_layernorm": True, "num_query_groups": 2, "kv_channels": 16, "sliding_window": 3,
    },
    "qwen2, windows in some layers": {**QWEN2, "sliding_window": 3, "window_attn_skip_freq": [2]},
    "qwen3, windows in some layers": {**LLAMA, "qk_layernorm": True, "sliding_window": 4, "window_attn_skip_freq": [3]},
    "qwen3, tied": {**LLAMA, "qk_layernorm": True},
    "ministral": {**LLAMA, "num_query_groups": 2, "sliding_window": 5, "window_attn_skip_freq": [3]},
    "gemma2": {
        **GEMMA, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
        "window_attn_skip_freq": [2],
    },
    "gemma2 without bounds, all layers with a window, untied": {**GEMMA, **SCALED, **UNTIED, "kv_channels": 12},
    "gemma3": {
        **GEMMA3, **SCALED, "query_pre_attn_scalar": 20, "rotary_base": 60.0, "rope_local_base_freq": 15.0,
        "rotary_scaling_factor": 3.0, "window_attn_skip_freq": [2],
    },
    "gemma3, bounded logits, one base, last layer with a window": {
        **GEMMA3, "kv_channels": 12, "final_logit_softcapping": 1.5, "window_attn_skip_freq": [0, 0, 1],
        "num_query_groups": 2,
    },
    "gemma3 without windows, scaled": {**GEMMA3, **YARN, "sliding_window": None},
    "neox, side by side": {**ROPE, **UNTIED, "rotary_percent": 0.25, "parallel_residual": True},
}  # fmt: skip
"""Models outside the classic layout."""

EXPERTS = {**LLAMA, "num_experts": [4], "moe_router_topk": 2, "num_query_groups": 2}
SHARED = {
    **EXPERTS, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "moe_ffn_hidden_size": 24,
}  # fmt: skip
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "moe_aux_loss_coeff": [0.02], "sliding_window": 5, "moe_input_jitter_eps": 0.01},
    "mixtral, 3 of 5 experts, untied": {
        **EXPERTS, **UNTIED, "moe_expert_capacity_factor": 1.0, "num_experts": [5], "moe_router_topk": 3,
        "moe_eval_capacity_factor": 1.75,  # of at least 5 / 3: no token is dropped
        "moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0],
    },
    "qwen2-moe": {**SHARED, "add_qkv_bias": True, "moe_router_pre_softmax": True},
    "qwen2-moe, top 1, every other layer, with a window": {
        **SHARED, "add_qkv_bias": True, "moe_router_topk": 1, "expert_interval": 2, "sliding_window": 3,
    },
    "qwen3-moe": {**EXPERTS, "qk_layernorm": True, "moe_ffn_hidden_size": 24, "moe_router_topk": 3},
    "qwen3-moe, weights of all, every other layer, with a window, untied": {
        **EXPERTS, **UNTIED, "qk_layernorm": True, "kv_channels": 12, "expert_interval": 2,
        "moe_router_pre_softmax": True, "sliding_window": 3,
    },
    "qwen2-moe, weights that sum to 1, no biases, first layer dense": {**SHARED, "num_experts": [1, 4, 4]},
}  # fmt: skip
"""Models outside the classic layout that have no recorded steps of generation."""


@functools.cache
def _templates() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def saved_model(folder: Path, model: dict[str, Any], precision: dict[str, Any] | None = None, layers: int = 3) -> Path:
    """A checkpoint of a random model, whose vocabulary is padded in memory. Equal models are built once and copied."""
    key = json.dumps([model, precision, layers])
    template = Path(_templates().name) / hashlib.sha256(key.encode()).hexdigest()
    if not template.exists():
        torch.manual_seed(1)
        shape = {"num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
        changes = {
            "model": {**shape, "make_vocab_size_divisible_by": 64, **model},
            "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1},
            **({"precision": precision} if precision else {}),
        }
        engines = tiny_engines(changes)
        randomize(engines.stages[0])
        save_checkpoint(template, 7, model_tensors(engines.stages), {"separate_main": False}, engines.config.to_yaml())
    shutil.copytree(template, folder, dirs_exist_ok=True)
    return folder


def convert(load: Path, save: Path, to: str, *flags: str) -> None:
    assert main(["--load", str(load), "--save", str(save), "--to", to, *flags]) == 0


def refusal(capsys: pytest.CaptureFixture[str], load: Path, save: Path, to: str, *flags: str) -> str:
    """Error line of a refused conversion, which leaves ``save`` as it was."""
    capsys.readouterr()
    existed = save.exists()
    assert main(["--load", str(load), "--save", str(save), "--to", to, *flags]) == 2
    *bar, line = capsys.readouterr().err.splitlines()
    assert line.startswith("ckpt_convert: error: ")
    assert not any(other.strip() and "converted:" not in other for other in bar)
    assert save.exists() == existed
    return line


def assert_same_weights(first: Weights, second: Weights) -> None:
    assert first.entries.keys() == second.entries.keys()
    for name, entry in first.entries.items():
        assert torch.equal(entry.read(), second.entries[name].read()), name


def assert_close(outputs: torch.Tensor, expected: torch.Tensor) -> None:
    assert outputs.shape == expected.shape
    assert float((outputs - expected).abs().max() / expected.abs().max()) < 1e-5


TOKENS_BS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def our_logits(folder: Path, tokens_bs: torch.Tensor = TOKENS_BS) -> torch.Tensor:
    """Logits of a checkpoint of ours."""
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)
    loaded = load_model(folder, tokenizer=tokenizer, device=torch.device("cpu"))
    with torch.no_grad():
        return loaded.stage.logits(loaded.stage(tokens_bs, ForwardContext())).transpose(0, 1)


def load_theirs(architecture: str, folder: Path) -> Any:
    """A model of transformers, whose weights are exactly those of the folder."""
    import transformers

    loaded: Any = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def randomize(model: torch.nn.Module) -> None:
    """Change all parameters: biases start at 0, norms at 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)


def change_json(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

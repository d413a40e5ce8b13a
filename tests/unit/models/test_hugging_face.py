"""Loss, logits and gradients against Hugging Face's GPT-2, Llama and Gemma with the same weights, in fp32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron.models.context import ForwardContext
from megatron.models.gpt import GPTStage
from tests.support.hf_weights import gpt2_pairs, gpt2_to_ours, llama_pairs, llama_to_ours
from tests.support.tiny import VOCAB, tiny_gpt
from tests.unit.models.reference import Convert, Pairs, assert_close, assert_same_gradients, copy_weights

HEADS, HIDDEN, LAYERS, LENGTH, BATCH = 4, 32, 3, 16, 2


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    no_dropout: dict[str, Any] = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, initializer_range=0.1, **sizes, **no_dropout))


def _llama(groups: int, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=groups,
            max_position_embeddings=LENGTH,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
    )


def _ours(model: dict[str, Any]) -> GPTStage:
    changes = {"model": {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, **model}}
    # The vocabulary is padded, which must change nothing.
    changes["model"]["make_vocab_size_divisible_by"] = 64
    return tiny_gpt(changes)


def _compare(theirs: Any, ours: GPTStage, pairs: Pairs, to_ours: Convert) -> None:
    copy_weights(theirs, ours, pairs, to_ours)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    their_logits = theirs(input_ids=inputs).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    their_loss.backward()

    x_sbh = ours(inputs, ForwardContext())
    weights = torch.full(labels.shape, 1.0 / labels.numel())
    loss, losses_bs = ours.token_losses(x_sbh, labels, weights)
    loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    assert losses_bs.mean().item() == pytest.approx(their_loss.item(), rel=1e-5)
    assert_close("logits", ours.logits(x_sbh.detach()).transpose(0, 1), their_logits.detach())
    assert_same_gradients(ours, pairs, to_ours)


def test_gpt2() -> None:
    torch.manual_seed(0)
    theirs, ours = _gpt2(), _ours({})
    _compare(theirs, ours, list(gpt2_pairs(theirs, ours)), partial(gpt2_to_ours, heads=HEADS))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_llama(groups: int, tied: bool) -> None:
    torch.manual_seed(1)
    model = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 48,
        "num_query_groups": groups,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not tied,
    }
    theirs, ours = _llama(groups, tied), _ours(model)
    _compare(theirs, ours, list(llama_pairs(theirs, ours)), partial(llama_to_ours, groups=groups))


GEMMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "apply_layernorm_1p": True,
    "sandwich_norm": True,
    "apply_embedding_scaling": True,
    "geglu": True,
    "ffn_hidden_size": 48,
    "num_query_groups": 2,
    "kv_channels": 12,
    "query_pre_attn_scalar": 5,
    "add_bias_linear": False,
    "sliding_window": 5,
    "window_attn_skip_freq": [2],
}
GEMMAS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {
        "qk_layernorm": True,
        "rotary_base": 60.0,
        "rope_local_base_freq": 15.0,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 3.0,
        "final_logit_softcapping": 2.0,
    },
}


def _gemma(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "gemma3_text":
        rope = {
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 60.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 15.0},
        }
    caps = {name: GEMMAS[kind].get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=12, max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5, query_pre_attn_scalar=5, sliding_window=5, rope_parameters=rope, initializer_range=0.1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], pad_token_id=None, **caps,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("kind", GEMMAS)
def test_gemma(kind: str) -> None:
    torch.manual_seed(4)
    theirs, ours = _gemma(kind), _ours({**GEMMA, **GEMMAS[kind]})
    _compare(theirs, ours, list(llama_pairs(theirs, ours)), partial(llama_to_ours, groups=2))

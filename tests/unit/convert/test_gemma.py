"""The text model of a Gemma 3 with images, a Gemma's precision, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.inference.model import load_model
from tests.support.tiny import VOCAB
from tests.unit.convert.support import (
    GEMMA,
    LENGTH,
    TOKENS_BS,
    assert_close,
    convert,
    our_logits,
    randomize,
    refusal,
    saved_model,
)


def _with_images() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5, "max_position_embeddings": LENGTH,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "initializer_range": 0.1,
    }  # fmt: skip
    images = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=images, mm_tokens_per_image=1, image_token_index=VOCAB - 1, boi_token_index=0
    )
    model = Gemma3ForConditionalGeneration(config)
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("first", ["", "language_model.model."], ids=["transformers 5", "as published"])
def test_the_text_of_a_gemma_with_images(first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    theirs, tokens_bs = _with_images(), TOKENS_BS.clamp(max=VOCAB - 2)
    theirs.save_pretrained(tmp_path / "hf")
    if first:
        file = tmp_path / "hf" / "model.safetensors"
        tensors = load_file(file)
        file.unlink()
        at = next(name for name in tensors if "embed_tokens" in name).removesuffix("embed_tokens.weight")
        save_file({name.replace(at, first).replace("model.vision", "vision"): t for name, t in tensors.items()}, file)
    capsys.readouterr()
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    assert f"note: the image encoder of {tmp_path / 'hf'} is left out" in capsys.readouterr().err
    with torch.no_grad():
        assert_close(our_logits(tmp_path / "ours", tokens_bs), theirs(input_ids=tokens_bs).logits)


def test_16_bit_logits_are_as_accurate_as_in_transformers(tmp_path: Path) -> None:
    """The scale of embeddings is rounded to the weights' type; here the square root of 24 is 4.90625."""
    from transformers import AutoModelForCausalLM

    model = {**GEMMA, "hidden_size": 24, "kv_channels": 8, "window_attn_skip_freq": [2], "final_logit_softcapping": 2.0}
    saved = saved_model(tmp_path / "ours", model, {"bf16": True})
    convert(saved, tmp_path / "hf", "hf")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    exact: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    embed = theirs.get_input_embeddings()
    exact.get_input_embeddings().embed_scale.copy_(embed.embed_scale.bfloat16())
    tokens_bs = TOKENS_BS.clamp(min=1)
    with torch.no_grad():
        expected, near = exact.eval()(input_ids=tokens_bs).logits, theirs.eval()(input_ids=tokens_bs).logits.float()
    logits = our_logits(saved, tokens_bs).float()
    assert float((logits - expected).square().mean()) < 1.2 * float((near - expected).square().mean())


def test_the_tokenizer_of_a_gemma_is_copied(tmp_path: Path) -> None:
    """Word pieces with "▁" for a space, and bytes for everything else."""
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "o", "l", "d", "ol", "old"]
    merges: Any = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("o", "l"), ("ol", "d")]
    theirs: Any = GemmaTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges)
    theirs.save_pretrained(tmp_path / "hf")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=320, max_position_embeddings=LENGTH
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    loaded = load_model(tmp_path / "ours", device=torch.device("cpu"))
    text = "the old the  \u00fc\U0001f600<eos>old"
    assert loaded.tokenizer.name == "HFTokenizer"
    assert loaded.tokenizer.tokenize(text) == theirs(text, add_special_tokens=False).input_ids
    assert (loaded.tokenizer.bos, loaded.tokenizer.eod) == (2, 1)
    assert loaded.tokenizer.tokenize("<bos>" + text) == [2, *loaded.tokenizer.tokenize(text)]
    assert loaded.tokenizer.detokenize(loaded.tokenizer.tokenize(text)) == text
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back: Any = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back(text).input_ids == theirs(text).input_ids
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert [written[f"{name}_token_id"] for name in ("pad", "eos", "bos")] == [0, 1, 2]


def test_a_vocabulary_of_the_default_size_is_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields missing from a text_config have transformers' defaults."""
    theirs = _with_images()
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["vocab_size"]
    path.write_text(json.dumps(config))
    assert "has shape (97, 32), but config.json specifies (262208, 32)" in refusal(
        capsys, tmp_path / "hf", tmp_path / "x", "megatron-cc"
    )

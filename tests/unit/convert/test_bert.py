"""BERT as Hugging Face's MegatronBert and back, in both directions, with and without the binary head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.load import load_tensors, saved_config
from megatron.checkpoint.model_state import model_tensors
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.hugging_face import write_hf
from megatron.convert.ours import read_ours
from megatron.convert.tokenizer_files import find_tokenizer
from megatron.inference.model import load_model
from megatron.models.bert import BertStage
from megatron.models.context import ForwardContext
from megatron.tokenizer.build import build_tokenizer
from tests.support.hf_weights import bert_logits
from tests.support.tiny import VOCAB, tiny_engines, tiny_pairs
from tests.unit.convert.support import (
    HEADS,
    HIDDEN,
    LENGTH,
    assert_close,
    assert_same_weights,
    convert,
    load_theirs,
    randomize,
    refusal,
    saved_model,
)

BERT: dict[str, Any] = {"model_type": "bert"}
KINDS: dict[str, dict[str, Any]] = {
    "two heads": BERT,
    "one head": {**BERT, "bert_binary_head": False, "num_tokentypes": 2},
}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48,
}  # fmt: skip


def _ours(folder: Path, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Logits of tokens and of the order."""
    weights = read_ours(folder)
    fields = {name: getattr(weights.model, name) for name in vars(weights.model)}
    stage = tiny_engines({"model": {**fields, "make_vocab_size_divisible_by": 64}}).stages[0]
    assert isinstance(stage, BertStage)
    load_tensors(folder, weights.iteration, model_tensors([stage]), None)
    context = ForwardContext(segment_ids_bs=batch["segment_ids_bs"], types_bs=batch["types_bs"])
    with torch.no_grad():
        x_sbh = stage(batch["tokens_bs"], context)
        order = stage.order_logits(stage.final_layernorm(x_sbh)) if weights.model.bert_binary_head else None
    return bert_logits(stage, x_sbh).transpose(0, 1), order


def _theirs(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    text_bs = (batch["segment_ids_bs"] == 0).long()
    with torch.no_grad():
        outputs = model.eval()(input_ids=batch["tokens_bs"], token_type_ids=batch["types_bs"], attention_mask=text_bs)
    if "logits" in outputs:
        return outputs.logits, None
    return outputs.prediction_logits, outputs.seq_relationship_logits


def _assert_equal(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None], text_bs: Tensor) -> None:
    (logits, order), (expected, expected_order) = ours, theirs
    assert float((logits - expected)[text_bs].abs().max() / expected[text_bs].abs().max()) < 1e-5
    assert (order is None) == (expected_order is None)
    if order is not None and expected_order is not None:
        assert_close(order, expected_order)


@pytest.mark.parametrize("name", KINDS)
def test_the_exported_and_the_imported_model_compute_the_same(name: str, tmp_path: Path) -> None:
    saved, batch = saved_model(tmp_path / "ours", KINDS[name]), tiny_pairs(range(3), LENGTH)
    convert(saved, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    (architecture,) = json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"]
    theirs = load_theirs(architecture, tmp_path / "hf")
    ours = _ours(saved, batch)
    _assert_equal(ours, _theirs(theirs, batch), batch["segment_ids_bs"] == 0)
    assert torch.equal(_ours(tmp_path / "back", batch)[0], ours[0])
    first, second = read_ours(saved), read_ours(tmp_path / "back")
    assert_same_weights(first, second)
    assert second.model == replace(first.model, make_vocab_size_divisible_by=128, init_method_std=0.02)


@pytest.mark.parametrize("name", KINDS)
def test_their_model_comes_in(name: str, tmp_path: Path) -> None:
    from transformers import MegatronBertConfig, MegatronBertForMaskedLM, MegatronBertForPreTraining

    torch.manual_seed(2)
    config = MegatronBertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, initializer_range=0.1, **SIZES)
    theirs: Any = (MegatronBertForPreTraining if name == "two heads" else MegatronBertForMaskedLM)(config)
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    batch = tiny_pairs(range(3), LENGTH)
    _assert_equal(_ours(tmp_path / "ours", batch), _theirs(theirs, batch), batch["segment_ids_bs"] == 0)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "cat", "##s", "caf\u00e9", "cafe"]
TEXT = "The cats, the Caf\u00e9"


@pytest.mark.parametrize("type_", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_the_vocabulary_is_copied(type_: Any, tmp_path: Path) -> None:
    import transformers

    vocab = tmp_path / "words of mine.txt"
    vocab.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    saved = saved_model(tmp_path / "ours", KINDS["two heads"])
    flags = TokenizerConfig(tokenizer_type=type_, vocab_file=str(vocab))
    (tmp_path / "hf").mkdir()
    write_hf(replace(read_ours(saved), tokenizer=flags), tmp_path / "hf", lambda nbytes: None)
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == vocab.read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert isinstance(theirs, transformers.BertTokenizer)
    expected = build_tokenizer(flags)
    assert theirs.encode(TEXT, add_special_tokens=False) == expected.tokenize(TEXT)
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    config = saved_config(tmp_path / "back")[0].tokenizer
    assert (config.tokenizer_type, config.vocab_file) == (type_, str(tmp_path / "hf" / "vocab.txt"))
    assert config.vocab_size == VOCAB
    assert build_tokenizer(config).tokenize(TEXT) == expected.tokenize(TEXT)


@pytest.mark.parametrize("entries", [len(WORDS), len(WORDS) + 2])
def test_their_vocabulary_comes_in(entries: int, tmp_path: Path) -> None:
    """Their models have no entries for Megatron's [BOS] and [EOS] unless they were exported from here."""
    from transformers import BertTokenizer, MegatronBertConfig, MegatronBertForPreTraining

    MegatronBertForPreTraining(MegatronBertConfig(vocab_size=entries, **SIZES)).save_pretrained(tmp_path / "hf")
    BertTokenizer(vocab={word: n for n, word in enumerate(WORDS)}, do_lower_case=False).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    tokenizer = build_tokenizer(saved_config(tmp_path / "ours")[0].tokenizer)
    assert tokenizer.name == "BertWordPieceCase"
    assert (tokenizer.bos, tokenizer.eod) == ((2, 3) if entries == len(WORDS) else (len(WORDS), len(WORDS) + 1))
    assert tokenizer.vocab_size == entries
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer", "strip_accents": False},
        {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False},
        {"tokenizer_class": "BertTokenizer", "additional_special_tokens": ["<new>"]},
    ],
)
def test_other_word_rules_use_the_tokenizer_of_hugging_face(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = find_tokenizer(tmp_path)
    assert tokenizer.tokenizer_type == "HFTokenizer"
    text = "the caf\u00e9 <new> cats"
    theirs = AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False)
    assert build_tokenizer(tokenizer).tokenize(text) == theirs


def test_models_without_a_counterpart_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = saved_model(tmp_path / "ours", {**BERT, "bert_binary_head": False})
    assert "closest to MegatronBert, which has --num-tokentypes of at least 2" in refusal(
        capsys, without, tmp_path / "hf", "hf"
    )
    assert "that layout has no model of kind bert" in refusal(capsys, without, tmp_path / "old", "classic")
    with pytest.raises(UserError, match="holds a model of type bert, and only gpt generates text"):
        load_model(without, device=torch.device("cpu"))

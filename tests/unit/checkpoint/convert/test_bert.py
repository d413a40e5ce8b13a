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
from megatron.checkpoint.convert.command import main
from megatron.checkpoint.convert.ours import read_ours
from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.model_state import model_tensors
from megatron.inference.model import load_model
from megatron.model.bert import BertStage
from megatron.model.context import ForwardContext
from tests.support.tiny import VOCAB, tiny_engines, tiny_pairs
from tests.unit.checkpoint.convert.support import HEADS, HIDDEN, LENGTH, convert, saved_model

BERT: dict[str, Any] = {"model_type": "bert"}
KINDS: dict[str, dict[str, Any]] = {
    "two heads": BERT,
    "one head": {**BERT, "bert_binary_head": False, "num_tokentypes": 2},
}


def _ours(folder: Path, given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Logits of tokens and of the order."""
    weights = read_ours(folder)
    fields = {name: getattr(weights.model, name) for name in vars(weights.model)}
    stage = tiny_engines({"model": {**fields, "make_vocab_size_divisible_by": 64}}).stages[0]
    assert isinstance(stage, BertStage)
    load_tensors(folder, weights.iteration, model_tensors([stage]), None)
    context = ForwardContext(segment_ids_bs=given["segment_ids_bs"], types_bs=given["types_bs"])
    with torch.no_grad():
        x_sbh = stage(given["tokens_bs"], context)
    order = stage.order_logits(x_sbh) if weights.model.bert_binary_head else None
    return stage.logits(x_sbh).transpose(0, 1), order


def _theirs(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    text_bs = (given["segment_ids_bs"] == 0).long()
    with torch.no_grad():
        found = model.eval()(input_ids=given["tokens_bs"], token_type_ids=given["types_bs"], attention_mask=text_bs)
    if "logits" in found:
        return found.logits, None
    return found.prediction_logits, found.seq_relationship_logits


def _assert_equal(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None], text_bs: Tensor) -> None:
    (logits, order), (expected, expected_order) = ours, theirs
    assert float((logits - expected)[text_bs].abs().max() / expected[text_bs].abs().max()) < 1e-5
    assert (order is None) == (expected_order is None)
    if order is not None and expected_order is not None:
        assert float((order - expected_order).abs().max() / expected_order.abs().max()) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_the_exported_and_the_imported_model_compute_the_same(name: str, tmp_path: Path) -> None:
    import transformers

    saved, given = saved_model(tmp_path / "ours", KINDS[name]), tiny_pairs(range(3), LENGTH)
    convert(saved, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    (architecture,) = json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"]
    loaded: Any = getattr(transformers, architecture).from_pretrained(tmp_path / "hf", output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = _ours(saved, given)
    _assert_equal(ours, _theirs(theirs, given), given["segment_ids_bs"] == 0)
    assert torch.equal(_ours(tmp_path / "back", given)[0], ours[0])
    first, second = read_ours(saved), read_ours(tmp_path / "back")
    assert first.entries.keys() == second.entries.keys()
    assert all(torch.equal(first.entries[n].read(), second.entries[n].read()) for n in first.entries)
    assert second.model == replace(first.model, make_vocab_size_divisible_by=128, init_method_std=0.02)


@pytest.mark.parametrize("name", KINDS)
def test_their_model_comes_in(name: str, tmp_path: Path) -> None:
    from transformers import MegatronBertConfig, MegatronBertForMaskedLM, MegatronBertForPreTraining

    torch.manual_seed(2)
    config = MegatronBertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
    )
    theirs: Any = (MegatronBertForPreTraining if name == "two heads" else MegatronBertForMaskedLM)(config)
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases begin at zero, norms at one
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    given = tiny_pairs(range(3), LENGTH)
    _assert_equal(_ours(tmp_path / "ours", given), _theirs(theirs, given), given["segment_ids_bs"] == 0)


def test_what_has_no_counterpart_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = saved_model(tmp_path / "ours", {**BERT, "bert_binary_head": False})
    assert main(["--load", str(without), "--save", str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "closest to MegatronBert, which has --num-tokentypes of at least 2" in capsys.readouterr().err
    assert main(["--load", str(without), "--save", str(tmp_path / "old"), "--to", "classic"]) == 2
    assert "that layout has no model of kind bert" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds a model of kind bert, and only gpt generates text"):
        load_model(without, device=torch.device("cpu"))

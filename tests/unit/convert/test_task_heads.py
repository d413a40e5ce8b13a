"""Fine-tuned models as Hugging Face's classifiers and back, in both directions: outputs, and every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.model_state import model_tensors
from megatron.convert.ours import read_ours
from megatron.models.classification import ClassifierStage
from megatron.models.context import ForwardContext
from megatron.models.losses import Targets
from tests.support.tiny import VOCAB, tiny_engines, tiny_pairs, tiny_texts
from tests.unit.convert.support import (
    HEADS,
    HIDDEN,
    LENGTH,
    assert_close,
    assert_same_weights,
    change_json,
    convert,
    load_theirs,
    randomize,
    refusal,
    saved_model,
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, classes": ("MegatronBertForSequenceClassification", {"task_head": "classification", "task_classes": 3}),
    "bert, a number": ("MegatronBertForSequenceClassification", {"task_head": "regression"}),
    "bert, choices": ("MegatronBertForMultipleChoice", {"task_head": "choice", "task_classes": 4}),
    "gpt, classes": ("GPT2ForSequenceClassification", {"task_head": "classification", "task_classes": 3}),
    "gpt, a number": ("GPT2ForSequenceClassification", {"task_head": "regression"}),
}
END = VOCAB - 1


def _model(name: str) -> dict[str, Any]:
    return {"model_type": name.partition(",")[0], **MODELS[name][1]}


def _batch(model_type: str) -> dict[str, Tensor]:
    """Samples of several lengths, with their padding."""
    if model_type == "bert":
        batch = tiny_pairs(range(8), LENGTH)
        return {**batch, "lengths_b": (batch["segment_ids_bs"] == 0).sum(dim=1)}
    batch, lengths_b = tiny_texts(range(8), LENGTH, False), torch.tensor([16, 3, 9, 2, 5, 16, 8, 7])
    tokens_bs = batch["tokens_bs"].clamp(1, END - 1)
    tokens_bs[torch.arange(LENGTH) >= lengths_b.unsqueeze(1) - 1] = END
    return {"tokens_bs": tokens_bs, "lengths_b": lengths_b}


def _ours(folder: Path, batch: dict[str, Tensor]) -> Tensor:
    """Head outputs of each sequence."""
    weights = read_ours(folder)
    fields = {name: getattr(weights.model, name) for name in vars(weights.model)}
    stage = tiny_engines({"model": {**fields, "make_vocab_size_divisible_by": 64}}).stages[0]
    assert isinstance(stage, ClassifierStage)
    load_tensors(folder, weights.iteration, model_tensors([stage]), None)
    context = ForwardContext(segment_ids_bs=batch.get("segment_ids_bs"), types_bs=batch.get("types_bs"))
    labels = torch.zeros(8, 1, dtype=torch.int64)
    with torch.no_grad():
        outputs = stage.loss(
            stage(batch["tokens_bs"], context), Targets(labels, torch.ones(8, 1), lengths_b=batch["lengths_b"])
        )
    assert outputs.outputs_bc is not None
    return outputs.outputs_bc


def _theirs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    tokens_bs, padded_bs = batch["tokens_bs"], torch.arange(LENGTH) >= batch["lengths_b"].unsqueeze(1)
    words: dict[str, Tensor] = {"attention_mask": (~padded_bs).long()}
    if "types_bs" in batch:
        words["token_type_ids"] = batch["types_bs"]
    else:
        tokens_bs = tokens_bs.masked_fill(padded_bs, model.config.pad_token_id)
    if "MultipleChoice" in type(model).__name__:
        words = {name: x.view(2, 4, -1) for name, x in words.items()}
        tokens_bs = tokens_bs.view(2, 4, -1)
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens_bs, **words).logits
    return logits.view(8, -1)


@pytest.mark.parametrize("name", MODELS)
def test_the_exported_and_the_imported_model_compute_the_same(name: str, tmp_path: Path) -> None:
    saved, batch = saved_model(tmp_path / "ours", _model(name)), _batch(_model(name)["model_type"])
    convert(saved, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "megatron-cc")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [MODELS[name][0]]
    theirs = load_theirs(MODELS[name][0], tmp_path / "hf")
    assert_close(_ours(saved, batch), _theirs(theirs, batch))
    first, second = read_ours(saved), read_ours(tmp_path / "back")
    assert_same_weights(first, second)
    assert second.model.type_and_task == first.model.type_and_task


@pytest.mark.parametrize("name", MODELS)
def test_their_model_comes_in(name: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(2)
    architecture, head = MODELS[name]
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.1}
    if name.startswith("gpt"):
        sizes |= {"n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "pad_token_id": 0}
    else:
        sizes |= {
            "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "max_position_embeddings": LENGTH,
        }  # fmt: skip
    sizes |= {"num_choices": 4} if "choices" in name else {"num_labels": head.get("task_classes", 1)}
    form = transformers.GPT2Config if name.startswith("gpt") else transformers.MegatronBertConfig
    theirs: Any = getattr(transformers, architecture)(form(**sizes))
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    batch = _batch(_model(name)["model_type"])
    assert_close(_ours(tmp_path / "ours", batch), _theirs(theirs, batch))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert, choices", {"num_choices": None}, "num_choices is missing; write the number of choices of a sample"),
        ("bert, choices", {"num_choices": 1}, "num_choices"),
        ("gpt, classes", {"problem_type": "multi_label_classification"}, "of 3 labels cannot be converted"),
        ("gpt, classes", {"id2label": {"0": "a", "1": "b"}}, "score.weight has shape (3, 32)"),
    ],
)
def test_other_heads_are_refused_in_one_line(
    name: str, change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(saved_model(tmp_path / "ours", _model(name)), tmp_path / "hf", "hf")
    change_json(tmp_path / "hf" / "config.json", change)
    assert message in refusal(capsys, tmp_path / "hf", tmp_path / "back", "megatron-cc")


def test_a_gpt_with_a_choice_head_has_no_counterpart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", {"task_head": "choice", "task_classes": 4})
    assert "closest to GPT-2, which has no --task-head choice" in refusal(capsys, saved, tmp_path / "hf", "hf")

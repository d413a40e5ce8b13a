"""Classifiers against Hugging Face's: outputs, losses and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.classification import ClassifierStage
from megatron.models.losses import StageLoss, Targets
from tests.support.hf_weights import bert_task_pairs, bert_to_ours, gpt2_pairs, gpt2_to_ours
from tests.support.tiny import VOCAB, tiny_engines, tiny_pairs, tiny_texts
from tests.unit.models.reference import assert_close, assert_same_gradients, context_of, copy_weights

HEADS, HIDDEN, LAYERS, LENGTH = 4, 32, 3, 16
BERT_TO_OURS = partial(bert_to_ours, heads=HEADS)


def _bert(kind: str, classes: int) -> Any:
    import transformers

    torch.manual_seed(0)
    labels: dict[str, Any] = {"num_labels": classes}
    config = transformers.MegatronBertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        hidden_act="gelu_new",
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        layer_norm_eps=1e-5,
        pad_token_id=None,
        **labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return getattr(transformers, f"MegatronBertFor{kind}")(config)


def _ours(**model: Any) -> ClassifierStage:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    stage = tiny_engines({"model": {"model_type": "bert", **sizes, **model}}).stages[0]
    assert isinstance(stage, ClassifierStage)
    return stage


def _loss(ours: ClassifierStage, tensors: dict[str, Tensor], labels_b: Tensor) -> StageLoss:
    """Losses of a label per sequence; the last does not count."""
    mask_bs = torch.ones(len(labels_b), 1)
    mask_bs[-1] = 0.0
    targets = Targets(labels_b.unsqueeze(1), mask_bs, lengths_b=tensors["lengths_b"])
    return ours.loss(ours(tensors["tokens_bs"], context_of(tensors)), targets, ours.counts(targets).double())


def _samples(count: int) -> dict[str, Tensor]:
    tensors = tiny_pairs(range(count), LENGTH)
    tensors["lengths_b"] = (tensors["segment_ids_bs"] == 0).sum(dim=1)
    assert len(tensors["lengths_b"].unique()) > 1, "all samples have the same length"
    return tensors


@pytest.mark.parametrize("head", ["classification", "regression"])
def test_a_bert_classifier_matches_hugging_face(head: str) -> None:
    classes = 3 if head == "classification" else 1
    theirs = _bert("SequenceClassification", classes)
    ours = _ours(task_head=head, task_classes=3 if classes == 3 else 0)
    pairs = list(bert_task_pairs(theirs))
    copy_weights(theirs, ours, pairs, BERT_TO_OURS)
    tensors = _samples(5)
    labels_b = torch.tensor([0, 2, 1, 2, 0]) if classes == 3 else torch.tensor([0.5, 2.0, -1.0, 4.0, 9.0]).double()
    text_bs = (tensors["segment_ids_bs"] == 0).long()
    logits = theirs(tensors["tokens_bs"], text_bs, tensors["types_bs"]).logits
    if classes == 3:
        expected = F.cross_entropy(logits[:-1], labels_b[:-1])
    else:
        expected = F.mse_loss(logits[:-1, 0], labels_b[:-1].float())
    expected.backward()
    loss = _loss(ours, tensors, labels_b)
    loss.objective.backward()
    assert loss.outputs_bc is not None
    assert_close("outputs", loss.outputs_bc, logits.detach())
    (loss_sum,) = loss.sums
    assert float(loss_sum.count) == 4.0
    assert float(loss_sum.total / loss_sum.count) == pytest.approx(expected.item(), rel=1e-5)
    assert loss.objective.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(ours, pairs, BERT_TO_OURS, zero=1e-5)


def test_a_bert_of_choices_matches_hugging_face() -> None:
    theirs, ours = _bert("MultipleChoice", 4), _ours(task_head="choice", task_classes=4)
    pairs = list(bert_task_pairs(theirs))
    copy_weights(theirs, ours, pairs, BERT_TO_OURS)
    tensors = _samples(12)
    labels_n = torch.tensor([3, 0, 2])
    shaped = [tensors[name].view(3, 4, LENGTH) for name in ("tokens_bs", "types_bs")]
    logits = theirs(shaped[0], (tensors["segment_ids_bs"] == 0).long().view(3, 4, LENGTH), shaped[1]).logits
    expected = F.cross_entropy(logits[:2], labels_n[:2])
    expected.backward()
    mask_bs = torch.zeros(12, 1)
    mask_bs[0] = mask_bs[4] = 1.0
    targets = Targets(labels_n.repeat_interleave(4).unsqueeze(1), mask_bs, lengths_b=tensors["lengths_b"])
    loss = ours.loss(ours(tensors["tokens_bs"], context_of(tensors)), targets, ours.counts(targets).double())
    loss.objective.backward()
    assert loss.outputs_bc is not None
    assert_close("outputs", loss.outputs_bc.view(3, 4), logits.detach())
    assert float(loss.sums[0].total / loss.sums[0].count) == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(ours, pairs, BERT_TO_OURS, zero=1e-5)


def test_a_gpt_classifier_of_the_last_token_matches_hugging_face() -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS}
    sizes |= {"num_labels": 3} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_head=HEADS, initializer_range=0.1, pad_token_id=VOCAB - 1, **sizes)
    torch.manual_seed(0)
    theirs = GPT2ForSequenceClassification(config)
    ours = _ours(model_type="gpt", task_head="classification", task_classes=3)
    pairs = [*gpt2_pairs(theirs, ours), ("classification_head.classifier.weight", [theirs.score.weight])]  # type: ignore[arg-type]
    to_ours = partial(gpt2_to_ours, heads=HEADS)
    copy_weights(theirs, ours, pairs, to_ours)
    tensors = tiny_texts(range(4), LENGTH, False)
    tensors["lengths_b"] = torch.tensor([16, 3, 9, 1])
    tensors["tokens_bs"] = tensors["tokens_bs"].clamp(max=VOCAB - 2)
    tensors["tokens_bs"][torch.arange(LENGTH) >= tensors["lengths_b"].unsqueeze(1)] = VOCAB - 1
    labels_b = torch.tensor([0, 2, 1, 0])
    logits = theirs(tensors["tokens_bs"]).logits
    F.cross_entropy(logits[:-1], labels_b[:-1]).backward()
    loss = _loss(ours, tensors, labels_b)
    loss.objective.backward()
    assert loss.outputs_bc is not None
    assert_close("outputs", loss.outputs_bc, logits.detach())
    assert_same_gradients(ours, pairs, to_ours, zero=1e-5)

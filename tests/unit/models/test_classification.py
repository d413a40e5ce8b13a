"""Models of whole samples against Hugging Face's: outputs, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.data.batch import Batch
from megatron.models.classification import ClassifierStage
from megatron.models.context import ForwardContext
from megatron.models.losses import StageLoss, Targets
from megatron.training.assembly import Engines
from megatron.training.step import train_step
from tests.support.hf_weights import bert_task_pairs, bert_to_ours, gpt2_pairs, gpt2_to_ours
from tests.support.tiny import VOCAB, tiny_engines, tiny_pairs, tiny_texts

TOLERANCE = 1e-5
HEADS, HIDDEN, LAYERS, LENGTH = 4, 32, 3, 16


def _bert(kind: str, classes: int) -> Any:
    import transformers

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


def _copy(theirs: nn.Module, ours: nn.Module, pairs: Iterable[tuple[str, list[Tensor]]], convert: Any) -> None:
    torch.manual_seed(0)
    params, named = dict(ours.named_parameters()), list(pairs)
    assert {name for name, _ in named} == set(params)
    with torch.no_grad():
        for part in theirs.parameters():  # no norm or bias keeps a value that would hide a mistake
            part.add_(torch.randn(part.shape), alpha=0.1)
        for name, parts in named:
            params[name].copy_(convert(name, parts, HEADS))


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    # What is zero but for rounding, as the gradient of a bias that all choices share, is measured against one.
    scale = expected.abs().max() if expected.abs().max() > TOLERANCE else 1.0
    assert (actual - expected).abs().max() / scale < TOLERANCE


def _assert_gradients(ours: nn.Module, pairs: Iterable[tuple[str, list[Tensor]]], convert: Any) -> None:
    params = dict(ours.named_parameters())
    for name, parts in pairs:
        gradients: list[Any] = [part.grad for part in parts]
        gradient = params[name].grad
        assert gradient is not None
        _assert_close(gradient, convert(name, gradients, HEADS))


def _found(ours: ClassifierStage, given: dict[str, Tensor], labels_b: Tensor) -> StageLoss:
    """The losses of one label for each sequence, all of which count but the last."""
    context = ForwardContext(segment_ids_bs=given.get("segment_ids_bs"), types_bs=given.get("types_bs"))
    mask_bs = torch.ones(len(labels_b), 1)
    mask_bs[-1] = 0.0
    targets = Targets(labels_b.unsqueeze(1), mask_bs, lengths_b=given["lengths_b"])
    return ours.loss(ours(given["tokens_bs"], context), targets, ours.counts(targets).double())


def _samples(count: int) -> dict[str, Tensor]:
    given = tiny_pairs(range(count), LENGTH)
    given["lengths_b"] = (given["segment_ids_bs"] == 0).sum(dim=1)
    assert len(given["lengths_b"].unique()) > 1, "all samples are equally long"
    return given


@pytest.mark.parametrize("head", ["classification", "regression"])
def test_bert_classifies_as_hugging_faces_does(head: str) -> None:
    classes = 3 if head == "classification" else 1
    theirs = _bert("SequenceClassification", classes)
    ours = _ours(task_head=head, task_classes=3 if classes == 3 else 0)
    _copy(theirs, ours, bert_task_pairs(theirs), bert_to_ours)
    given = _samples(5)
    labels_b = torch.tensor([0, 2, 1, 2, 0]) if classes == 3 else torch.tensor([0.5, 2.0, -1.0, 4.0, 9.0]).double()
    text_bs = (given["segment_ids_bs"] == 0).long()
    logits = theirs(given["tokens_bs"], text_bs, given["types_bs"]).logits
    if classes == 3:
        expected = F.cross_entropy(logits[:-1], labels_b[:-1])
    else:
        expected = F.mse_loss(logits[:-1, 0], labels_b[:-1].float())
    expected.backward()
    found = _found(ours, given, labels_b)
    found.objective.backward()
    assert found.outputs_bc is not None
    _assert_close(found.outputs_bc, logits.detach())
    (one,) = found.sums
    assert float(one.count) == 4.0
    assert float(one.total / one.count) == pytest.approx(expected.item(), rel=TOLERANCE)
    assert found.objective.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    _assert_gradients(ours, bert_task_pairs(theirs), bert_to_ours)


def test_bert_chooses_as_hugging_faces_does() -> None:
    theirs, ours = _bert("MultipleChoice", 4), _ours(task_head="choice", task_classes=4)
    _copy(theirs, ours, bert_task_pairs(theirs), bert_to_ours)
    given = _samples(12)
    labels_n = torch.tensor([3, 0, 2])
    shaped = [given[name].view(3, 4, LENGTH) for name in ("tokens_bs", "types_bs")]
    logits = theirs(shaped[0], (given["segment_ids_bs"] == 0).long().view(3, 4, LENGTH), shaped[1]).logits
    expected = F.cross_entropy(logits[:2], labels_n[:2])
    expected.backward()
    context = ForwardContext(segment_ids_bs=given["segment_ids_bs"], types_bs=given["types_bs"])
    mask_bs = torch.zeros(12, 1)
    mask_bs[0] = mask_bs[4] = 1.0
    targets = Targets(labels_n.repeat_interleave(4).unsqueeze(1), mask_bs, lengths_b=given["lengths_b"])
    found = ours.loss(ours(given["tokens_bs"], context), targets, ours.counts(targets).double())
    found.objective.backward()
    assert found.outputs_bc is not None
    _assert_close(found.outputs_bc.view(3, 4), logits.detach())
    assert float(found.sums[0].total / found.sums[0].count) == pytest.approx(expected.item(), rel=TOLERANCE)
    _assert_gradients(ours, bert_task_pairs(theirs), bert_to_ours)


def test_gpt_classifies_by_its_last_token_as_hugging_faces_does() -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS}
    sizes |= {"num_labels": 3} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_head=HEADS, initializer_range=0.1, pad_token_id=VOCAB - 1, **sizes)
    theirs = GPT2ForSequenceClassification(config)
    ours = _ours(model_type="gpt", task_head="classification", task_classes=3)
    pairs = [*gpt2_pairs(theirs, ours), ("classification_head.classifier.weight", [theirs.score.weight])]  # type: ignore[arg-type]
    _copy(theirs, ours, pairs, gpt2_to_ours)
    given = tiny_texts(range(4), LENGTH, False)
    given["lengths_b"] = torch.tensor([16, 3, 9, 1])
    given["tokens_bs"] = given["tokens_bs"].clamp(max=VOCAB - 2)
    given["tokens_bs"][torch.arange(LENGTH) >= given["lengths_b"].unsqueeze(1)] = VOCAB - 1
    labels_b = torch.tensor([0, 2, 1, 0])
    logits = theirs(given["tokens_bs"]).logits
    F.cross_entropy(logits[:-1], labels_b[:-1]).backward()
    found = _found(ours, given, labels_b)
    found.objective.backward()
    assert found.outputs_bc is not None
    _assert_close(found.outputs_bc, logits.detach())
    _assert_gradients(ours, pairs, gpt2_to_ours)


def _engines(size: int) -> Engines:
    return tiny_engines(
        {
            "model": {"model_type": "bert", "task_head": "classification", "task_classes": 3},
            "training": {"micro_batch_size": 1, "global_batch_size": size},
            "precision": {"fp64": True},
        }
    )


def test_losses_are_means_over_the_samples_that_count() -> None:
    """A last batch that is filled up has the loss and gradients of a smaller one: of the mean over its samples."""
    given, ids = _samples(4), torch.arange(4)
    given["labels_bs"] = (ids % 3).unsqueeze(1)
    given["loss_mask_bs"] = (ids < 3).float().unsqueeze(1)
    found = []
    for size in (4, 3):
        batches = [
            Batch(sample_ids_b=ids[n : n + 1], draw_ids_b=ids[n : n + 1], **{k: v[n : n + 1] for k, v in given.items()})
            for n in range(size)
        ]
        metrics = train_step(_engines(size), batches, 0, 1e-3, 0.0)
        found.append((metrics.loss, metrics.grad_norm))
    engines = _engines(4)
    (stage,) = engines.stages
    for buffer in engines.buffers:
        buffer.grads_flat.zero_()
    targets = Targets(given["labels_bs"], given["loss_mask_bs"], lengths_b=given["lengths_b"])
    context = ForwardContext(segment_ids_bs=given["segment_ids_bs"], types_bs=given["types_bs"])
    objective = stage.loss(stage(given["tokens_bs"], context), targets, stage.counts(targets)).objective
    objective.backward()
    norm = torch.cat([buffer.grads_flat for buffer in engines.buffers]).norm()
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] == pytest.approx((objective.item(), float(norm)), rel=1e-12)

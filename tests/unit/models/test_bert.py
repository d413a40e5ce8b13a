"""BERT against Hugging Face's MegatronBert, its attention and its FLOPs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.models.bert import BertStage
from megatron.models.flops import model_flops_per_sample
from megatron.models.losses import Targets
from tests.support.hf_weights import bert_logits, bert_pairs, bert_to_ours
from tests.support.tiny import VOCAB, tiny_engines, tiny_pairs
from tests.unit.models.reference import assert_close, assert_same_gradients, context_of, copy_weights

HEADS, HIDDEN, LAYERS, LENGTH = 4, 32, 3, 16


def _theirs(binary_head: bool, activation: str) -> Any:
    from transformers import MegatronBertConfig, MegatronBertForMaskedLM, MegatronBertForPreTraining

    config = MegatronBertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        hidden_act=activation,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        layer_norm_eps=1e-5,
        pad_token_id=None,
    )
    return (MegatronBertForPreTraining if binary_head else MegatronBertForMaskedLM)(config)


def _ours(**model: Any) -> BertStage:
    # The vocabulary is padded, which must change nothing.
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    shape = {"model_type": "bert", "make_vocab_size_divisible_by": 64, **sizes, **model}
    stage = tiny_engines({"model": shape}).stages[0]
    assert isinstance(stage, BertStage)
    return stage


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_logits_losses_and_gradients_match_megatron_bert(binary_head: bool, activation: str) -> None:
    torch.manual_seed(0)
    theirs = _theirs(binary_head, activation)
    ours = _ours(bert_binary_head=binary_head, num_tokentypes=2, bias_gelu_fusion=activation == "gelu_new")
    pairs, to_ours = list(bert_pairs(theirs, ours)), partial(bert_to_ours, heads=HEADS)
    copy_weights(theirs, ours, pairs, to_ours)
    tensors = tiny_pairs(range(4), LENGTH)
    mask_bs, text_bs = tensors["loss_mask_bs"], tensors["segment_ids_bs"] == 0
    assert not text_bs.all(), "nothing is padded"
    outputs = theirs(input_ids=tensors["tokens_bs"], token_type_ids=tensors["types_bs"], attention_mask=text_bs.long())
    their_logits = outputs.prediction_logits if binary_head else outputs.logits
    losses = F.cross_entropy(their_logits.flatten(0, 1), tensors["labels_bs"].flatten(), reduction="none")
    expected = [(losses * mask_bs.flatten()).sum() / mask_bs.sum()]
    if binary_head:
        expected.append(F.cross_entropy(outputs.seq_relationship_logits, tensors["order_b"]))
    torch.stack(expected).sum().backward()

    x_sbh = ours(tensors["tokens_bs"], context_of(tensors))
    targets = Targets(tensors["labels_bs"], mask_bs, tensors["order_b"])
    loss = ours.loss(x_sbh, targets, ours.counts(targets).double())
    loss.objective.backward()
    means = [float(loss_sum.total / loss_sum.count) for loss_sum in loss.sums]
    assert means == pytest.approx([x.item() for x in expected], rel=1e-5)
    logits_bsv = bert_logits(ours, x_sbh).transpose(0, 1)
    assert_close("logits", logits_bsv[text_bs], their_logits.detach()[text_bs])
    if binary_head:
        order = ours.order_logits(ours.final_layernorm(x_sbh)).detach()
        assert_close("order", order, outputs.seq_relationship_logits.detach())
    assert_same_gradients(ours, pairs, to_ours)


def test_text_attends_to_all_text_and_no_padding() -> None:
    stage, tensors = _ours(), tiny_pairs([3], LENGTH)
    text = int((tensors["segment_ids_bs"] == 0).sum())
    assert text < LENGTH
    before = stage(tensors["tokens_bs"], context_of(tensors))
    for position in range(LENGTH):
        tensors["tokens_bs"] = tiny_pairs([3], LENGTH)["tokens_bs"]
        tensors["tokens_bs"][0, position] = (tensors["tokens_bs"][0, position] + 1) % VOCAB
        changed = (stage(tensors["tokens_bs"], context_of(tensors)) != before).any(dim=2)[:text, 0]
        assert changed.all() if position < text else not changed.any()


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["sdpa", "written out"])
def test_all_positions_attend_to_each_other_without_padding(dropout: float) -> None:
    stage, tensors = _ours(attention_dropout=dropout), tiny_pairs([0], LENGTH)
    explicit = replace(context_of(tensors), segment_ids_bs=torch.zeros_like(tensors["segment_ids_bs"]))
    context = replace(explicit, segment_ids_bs=None)
    torch.testing.assert_close(stage(tensors["tokens_bs"], context), stage(tensors["tokens_bs"], explicit))


def test_token_types_distinguish_the_sentences() -> None:
    tensors = tiny_pairs([0], LENGTH)
    for stage, has_types in ((_ours(), True), (_ours(num_tokentypes=0), False), (_ours(bert_binary_head=False), False)):
        first = stage(tensors["tokens_bs"], context_of(tensors))
        second = stage(tensors["tokens_bs"], replace(context_of(tensors), types_bs=1 - tensors["types_bs"]))
        assert torch.equal(first, second) is not has_types


def test_flops() -> None:
    """Attention in both directions, and the product before the logits."""
    model = tiny_engines({"model": {"model_type": "bert"}}).config.model
    gpt = tiny_engines({}).config.model
    pairs = model.seq_length * (model.seq_length - 1) // 2
    extra = model.num_layers * 2 * pairs * model.hidden_size + model.seq_length * model.hidden_size**2
    ours, theirs = (model_flops_per_sample(config, 97) for config in (model, gpt))
    assert ours - theirs == 6 * extra

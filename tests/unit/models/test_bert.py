"""BERT against Hugging Face's form of Megatron's, its weights in the loss, and what attention sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.batch import Batch
from megatron.models.bert import BertStage
from megatron.models.context import ForwardContext
from megatron.models.losses import Targets
from megatron.training.flops import model_flops_per_sample
from megatron.training.report import model_shape
from megatron.training.step import train_step
from tests.support.hf_weights import bert_pairs, bert_to_ours
from tests.support.tiny import VOCAB, tiny_batches, tiny_engines, tiny_pairs

TOLERANCE = 1e-5
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
    # A padded vocabulary: padding must change nothing.
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    shape = {"model_type": "bert", "make_vocab_size_divisible_by": 64, **sizes, **model}
    stage = tiny_engines({"model": shape}).stages[0]
    assert isinstance(stage, BertStage)
    return stage


def _context(given: dict[str, Tensor]) -> ForwardContext:
    return ForwardContext(segment_ids_bs=given["segment_ids_bs"], types_bs=given["types_bs"])


def _assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_logits_losses_and_gradients_are_those_of_megatron_bert(binary_head: bool, activation: str) -> None:
    torch.manual_seed(0)
    theirs = _theirs(binary_head, activation)
    ours = _ours(bert_binary_head=binary_head, num_tokentypes=2, bias_gelu_fusion=activation == "gelu_new")
    params, named = dict(ours.named_parameters()), list(bert_pairs(theirs, ours))
    assert {name for name, _ in named} == set(params)
    with torch.no_grad():
        for part in theirs.parameters():  # no norm or bias keeps a value that would hide a mistake
            part.add_(torch.randn(part.shape), alpha=0.1)
        for name, parts in named:
            value = bert_to_ours(name, parts, HEADS)
            params[name][: value.shape[0]].copy_(value)
    given = tiny_pairs(range(4), LENGTH)
    mask_bs, text_bs = given["loss_mask_bs"], given["segment_ids_bs"] == 0
    assert not text_bs.all(), "nothing is padded"
    found = theirs(input_ids=given["tokens_bs"], token_type_ids=given["types_bs"], attention_mask=text_bs.long())
    their_logits = found.prediction_logits if binary_head else found.logits
    losses = F.cross_entropy(their_logits.flatten(0, 1), given["labels_bs"].flatten(), reduction="none")
    expected = [(losses * mask_bs.flatten()).sum() / mask_bs.sum()]
    if binary_head:
        expected.append(F.cross_entropy(found.seq_relationship_logits, given["order_b"]))
    torch.stack(expected).sum().backward()

    x_sbh = ours(given["tokens_bs"], _context(given))
    targets = Targets(given["labels_bs"], mask_bs, given["order_b"])
    loss = ours.loss(x_sbh, targets, ours.counts(targets).double())
    loss.objective.backward()
    means = [float(one.total / one.count) for one in loss.sums]
    assert means == pytest.approx([one.item() for one in expected], rel=TOLERANCE)
    logits_bsv = ours.logits(x_sbh.detach()).transpose(0, 1)
    _assert_close("logits", logits_bsv[text_bs], their_logits.detach()[text_bs])
    if binary_head:
        _assert_close("order", ours.order_logits(x_sbh.detach()), found.seq_relationship_logits.detach())
    for name, parts in named:
        theirs_by_part: list[Any] = [part.grad for part in parts]
        gradient, actual = bert_to_ours(name, theirs_by_part, HEADS), params[name].grad
        assert actual is not None
        _assert_close(name, actual[: gradient.shape[0]], gradient)
        assert not actual[gradient.shape[0] :].any(), f"{name}: the vocabulary's padding got a gradient"


def test_text_sees_all_of_the_text_and_no_padding() -> None:
    stage, given = _ours(), tiny_pairs([3], LENGTH)
    text = int((given["segment_ids_bs"] == 0).sum())
    assert text < LENGTH
    before = stage(given["tokens_bs"], _context(given))
    for place in range(LENGTH):
        given["tokens_bs"] = tiny_pairs([3], LENGTH)["tokens_bs"]
        given["tokens_bs"][0, place] = (given["tokens_bs"][0, place] + 1) % VOCAB
        changed = (stage(given["tokens_bs"], _context(given)) != before).any(dim=2)[:text, 0]
        assert changed.all() if place < text else not changed.any()


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["sdpa", "written out"])
def test_without_padding_all_positions_see_each_other(dropout: float) -> None:
    stage, given = _ours(attention_dropout=dropout), tiny_pairs([0], LENGTH)
    context = ForwardContext(types_bs=given["types_bs"])
    segments = torch.zeros_like(given["segment_ids_bs"])
    told = replace(context, segment_ids_bs=segments)
    torch.testing.assert_close(stage(given["tokens_bs"], context), stage(given["tokens_bs"], told))


def test_token_types_tell_the_sentences_apart() -> None:
    given = tiny_pairs([0], LENGTH)
    for stage, tells in ((_ours(), True), (_ours(num_tokentypes=0), False), (_ours(bert_binary_head=False), False)):
        first = stage(given["tokens_bs"], _context(given))
        second = stage(given["tokens_bs"], replace(_context(given), types_bs=1 - given["types_bs"]))
        assert torch.equal(first, second) is not tells


def _step(batches: list[Batch], micro: int) -> tuple[dict[str, float], float | None]:
    training = {"micro_batch_size": micro, "global_batch_size": 4}
    engines = tiny_engines({"model": {"model_type": "bert"}, "training": training, "precision": {"fp64": True}})
    metrics = train_step(engines, batches, 0, 1e-3, 0.0)
    return dict(metrics.losses), metrics.grad_norm


def test_a_batch_without_masked_words_trains_on_the_order_alone() -> None:
    """And a batch in which nothing counts at all does not exist: each sample has an order."""
    engines = tiny_engines({"model": {"model_type": "bert"}})
    batches = tiny_batches(engines.config, engines.topology, False)
    taken = [next(batches) for _ in range(4)]
    bare = [replace(batch, loss_mask_bs=torch.zeros(1, LENGTH)) for batch in taken]
    losses, norm = _step(bare, 1)
    assert losses["lm loss"] == 0.0
    assert losses["sop loss"] > 0.0
    assert norm is not None
    assert norm > 0.0


def test_losses_are_means_over_the_global_batch() -> None:
    given = tiny_pairs(range(4), LENGTH)
    ids = torch.arange(4)
    whole = [Batch(sample_ids_b=ids, draw_ids_b=ids, **given)]
    single = [
        Batch(sample_ids_b=ids[n : n + 1], draw_ids_b=ids[n : n + 1], **{k: v[n : n + 1] for k, v in given.items()})
        for n in range(4)
    ]
    together, apart = _step(whole, 4), _step(single, 1)
    assert apart[0] == pytest.approx(together[0], rel=1e-12)
    assert apart[1] == pytest.approx(together[1], rel=1e-12)
    # The gradient is that of the sum of both means.
    engines = tiny_engines({"model": {"model_type": "bert"}, "precision": {"fp64": True}})
    stage = engines.stages[0]
    targets = Targets(given["labels_bs"], given["loss_mask_bs"], given["order_b"])
    for buffer in engines.buffers:
        buffer.grads_flat.zero_()
    stage.loss(stage(given["tokens_bs"], _context(given)), targets, stage.counts(targets)).objective.backward()
    norm = torch.cat([buffer.grads_flat for buffer in engines.buffers]).norm()
    assert together[1] == pytest.approx(float(norm), rel=1e-12)


def test_operations_are_counted() -> None:
    """In both directions, and with the product before the logits."""
    bert = tiny_engines({"model": {"model_type": "bert"}}).config
    gpt = tiny_engines({}).config
    model = bert.model
    pairs = model.seq_length * (model.seq_length - 1) // 2
    more = model.num_layers * 2 * pairs * model.hidden_size + model.seq_length * model.hidden_size**2
    ours, theirs = (model_flops_per_sample(model_shape(config, 97)) for config in (bert, gpt))
    assert ours - theirs == 6 * more

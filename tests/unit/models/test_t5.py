"""T5 against a plain T5 of torch's modules, its attention, stages and FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.flops import model_flops_per_sample
from megatron.models.losses import Targets
from megatron.models.stages import boundary_lengths, stage_layers
from megatron.models.t5 import T5Stage
from megatron.training.assembly import make_layout
from tests.support.tiny import T5, VOCAB, tiny_config, tiny_engines, tiny_spans
from tests.unit.models.reference import Pairs, assert_close, assert_same_gradients, context_of, copy_weights

HEADS, HIDDEN, ENCODER, DECODER, LENGTH, SHORT = 4, 32, 2, 3, 16, 8
SIZES = {"num_layers": ENCODER, "decoder_num_layers": DECODER, "hidden_size": HIDDEN, "num_attention_heads": HEADS}


class PlainAttention(nn.Module):
    """torch's projections; scores, mask and softmax written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x_bsh: Tensor, read_bsh: Tensor, allowed: Tensor) -> Tensor:
        def heads(y_bsh: Tensor) -> Tensor:
            return y_bsh.unflatten(2, (HEADS, -1)).transpose(1, 2)

        q, k, v = heads(self.q(x_bsh)), heads(self.k(read_bsh)), heads(self.v(read_bsh))
        scores = q @ k.transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
        # Finite, as in Megatron, so that rows of padding have no nan.
        probs = scores.masked_fill(~allowed.unsqueeze(1), -10000.0).softmax(dim=3)
        return self.out((probs @ v).transpose(1, 2).flatten(2))


class PlainLayer(nn.Module):
    """A layer of an encoder, or with cross-attention of a decoder."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), PlainAttention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.cross = PlainAttention() if crosses else None
        self.norm3 = nn.LayerNorm(HIDDEN) if crosses else None

    def forward(self, x: Tensor, mask: Tensor, read: Tensor | None = None, cross_mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, mask)
        if self.cross is not None and self.norm3 is not None:
            x = x + self.cross(self.norm3(x), read, cross_mask)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainT5(nn.Module):
    """An encoder and a decoder over (b, s) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.encoder = nn.ModuleList(PlainLayer(False) for _ in range(ENCODER))
        self.decoder = nn.ModuleList(PlainLayer(True) for _ in range(DECODER))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        text, target = tensors["segment_ids_bs"] == 0, tensors["decoder_segment_ids_bs"] == 0
        x = self.words(tensors["tokens_bs"]) + self.places.weight[: text.shape[1]]
        for layer in self.encoder:
            x = layer(x, text.unsqueeze(2) & text.unsqueeze(1))
        read = self.encoder_norm(x)
        y = self.words(tensors["decoder_tokens_bs"]) + self.places.weight[: target.shape[1]]
        for layer in self.decoder:
            earlier = (target.unsqueeze(2) & target.unsqueeze(1)).tril()
            y = layer(y, earlier, read, target.unsqueeze(2) & text.unsqueeze(1))
        return self.decoder_norm(y) @ self.words.weight.t() + self.bias


def _fused(name: str, weights: list[Tensor]) -> Tensor:
    """Our fused projections have the rows of all projections head by head."""
    if len(weights) == 1:
        return weights[0]
    return torch.stack([weight.unflatten(0, (HEADS, -1)) for weight in weights], dim=1).flatten(0, 2)


def _pairs(theirs: PlainT5) -> Pairs:
    params: dict[str, list[Tensor]] = {
        "embedding.word_embeddings.weight": [theirs.words.weight],
        "embedding.position_embeddings.weight": [theirs.places.weight],
        "lm_head.bias": [theirs.bias],
    }
    modules: dict[str, list[Any]] = {
        "encoder_final_layernorm": [theirs.encoder_norm],
        "final_layernorm": [theirs.decoder_norm],
    }
    for number, layer in enumerate([*theirs.encoder, *theirs.decoder]):
        prefix, attention = f"layers.{number}", layer.attention
        modules |= {
            f"{prefix}.input_layernorm": [layer.norm1],
            f"{prefix}.self_attention.query_key_value": [attention.q, attention.k, attention.v],
            f"{prefix}.self_attention.dense": [attention.out],
            f"{prefix}.mlp.dense_h_to_4h": [layer.up],
            f"{prefix}.mlp.dense_4h_to_h": [layer.down],
        }
        if layer.cross is None:
            modules[f"{prefix}.post_attention_layernorm"] = [layer.norm2]
            continue
        modules |= {
            f"{prefix}.post_attention_layernorm": [layer.norm3],
            f"{prefix}.cross_attention.query": [layer.cross.q],
            f"{prefix}.cross_attention.key_value": [layer.cross.k, layer.cross.v],
            f"{prefix}.cross_attention.dense": [layer.cross.out],
            f"{prefix}.post_cross_attention_layernorm": [layer.norm2],
        }
    for name, sources in modules.items():
        params |= {f"{name}.{kind}": [getattr(source, kind) for source in sources] for kind in ("weight", "bias")}
    return list(params.items())


def _ours(**model: Any) -> T5Stage:
    # The vocabulary is padded, which must change nothing.
    changes = {"model": {**T5["model"], "make_vocab_size_divisible_by": 64, **SIZES, **model}, "precision": FP64}
    stage = tiny_engines({**T5, **changes}).stages[0]
    assert isinstance(stage, T5Stage)
    return stage


FP64 = {"fp64": True}


def test_logits_loss_and_gradients_match_a_plain_t5() -> None:
    torch.manual_seed(0)
    theirs, ours = PlainT5().double(), _ours()
    copy_weights(theirs, ours, _pairs(theirs), _fused)
    tensors = tiny_spans(range(4), LENGTH, SHORT)
    mask_bs, target_bs = tensors["loss_mask_bs"], tensors["decoder_segment_ids_bs"] == 0
    assert not target_bs.all(), "no decoder is padded"
    assert (tensors["segment_ids_bs"] == 1).any(), "no encoder is padded"
    logits_bsv = theirs(tensors)
    losses = F.cross_entropy(logits_bsv.flatten(0, 1), tensors["labels_bs"].flatten(), reduction="none")
    expected = (losses * mask_bs.flatten()).sum() / mask_bs.sum()
    expected.backward()

    x_sbh = ours(tensors["tokens_bs"], context_of(tensors))
    targets = Targets(tensors["labels_bs"], mask_bs)
    loss = ours.loss(x_sbh, targets, ours.counts(targets).double())
    loss.objective.backward()
    (loss_sum,) = loss.sums
    assert float(loss_sum.total / loss_sum.count) == pytest.approx(expected.item(), rel=1e-10)
    states_bsh = ours.final_layernorm(x_sbh.detach()).transpose(0, 1)
    logits = F.linear(states_bsh, ours.output_weight, ours.lm_head.bias)[..., :VOCAB].detach()
    assert_close("logits", logits[target_bs], logits_bsv.detach()[target_bs], 1e-10)
    assert_same_gradients(ours, _pairs(theirs), _fused, tolerance=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["sdpa", "written out"])
def test_the_decoder_attends_to_earlier_tokens_and_all_text(dropout: float) -> None:
    tensors = tiny_spans([3], LENGTH, SHORT)
    stage = _ours(attention_dropout=dropout)
    text, target = (int((tensors[name] == 0).sum()) for name in ("segment_ids_bs", "decoder_segment_ids_bs"))
    assert text < LENGTH
    assert target < SHORT
    before = stage(tensors["tokens_bs"], context_of(tensors))
    assert before.isfinite().all()
    for name, length in (("tokens_bs", LENGTH), ("decoder_tokens_bs", SHORT)):
        for position in range(length):
            other = {**tensors, name: tensors[name].clone()}
            other[name][0, position] = (other[name][0, position] + 1) % VOCAB
            changed = (stage(other["tokens_bs"], context_of(other)) != before).any(dim=2)[:target, 0]
            if name == "tokens_bs":
                assert changed.all() if position < text else not changed.any(), position
            else:
                assert changed.tolist() == [position <= later for later in range(target)], position


def test_the_split_rank_divides_the_pipeline() -> None:
    stages = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_split_rank": 1}
    model = {**T5["model"], "num_layers": 2, "decoder_num_layers": 6}
    config = tiny_config({**T5, "model": model, "parallel": stages}, 4)
    layout = make_layout(config, 4)
    layers = [stage_layers(config.model, layout, stage) for stage in range(4)]
    assert layers == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert boundary_lengths(config.model, layout, LENGTH) == [LENGTH, LENGTH + SHORT, LENGTH + SHORT]


def test_flops() -> None:
    """As torch counts a plain T5 with full attention, less the masked pairs of the decoder."""
    from torch.utils.flop_counter import FlopCounterMode

    theirs, tensors = PlainT5(), tiny_spans([0], LENGTH, SHORT)
    with FlopCounterMode(display=False) as counter:
        theirs(tensors)
    model = tiny_engines({**T5, "model": {**T5["model"], **SIZES}}).config.model
    assert 3 * counter.get_total_flops() == model_flops_per_sample(model, VOCAB, causal=False)
    later = DECODER * 2 * (SHORT * (SHORT - 1) // 2) * HIDDEN
    assert model_flops_per_sample(model, VOCAB) == model_flops_per_sample(model, VOCAB, causal=False) - 6 * later

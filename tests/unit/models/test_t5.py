"""T5 against a plain one of torch's modules, its weights in the loss, and what attention sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.data.batch import Batch
from megatron.models.context import ForwardContext
from megatron.models.losses import Targets
from megatron.models.stages import boundary_lengths, stage_layers
from megatron.models.t5 import T5Stage
from megatron.training.assembly import layout_of
from megatron.training.flops import model_flops_per_sample
from megatron.training.report import model_shape
from megatron.training.step import train_step
from tests.support.tiny import T5, VOCAB, tiny_config, tiny_engines, tiny_spans

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
        # As Megatron masks: with a number, so that a row of nothing but padding is still one of numbers.
        probs = scores.masked_fill(~allowed.unsqueeze(1), -10000.0).softmax(dim=3)
        return self.out((probs @ v).transpose(1, 2).flatten(2))


class PlainLayer(nn.Module):
    """A layer of an encoder, or (crossing) of a decoder."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), PlainAttention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.cross = PlainAttention() if crosses else None
        self.norm3 = nn.LayerNorm(HIDDEN) if crosses else None

    def forward(self, x: Tensor, own: Tensor, read: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, own)
        if self.cross is not None and self.norm3 is not None:
            assert read is not None
            assert allowed is not None
            x = x + self.cross(self.norm3(x), read, allowed)
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

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        text, own = given["segment_ids_bs"] == 0, given["decoder_segment_ids_bs"] == 0
        x = self.words(given["tokens_bs"]) + self.places.weight[: text.shape[1]]
        for layer in self.encoder:
            x = layer(x, text.unsqueeze(2) & text.unsqueeze(1))
        read = self.encoder_norm(x)
        y = self.words(given["decoder_tokens_bs"]) + self.places.weight[: own.shape[1]]
        for layer in self.decoder:
            earlier = (own.unsqueeze(2) & own.unsqueeze(1)).tril()
            y = layer(y, earlier, read, own.unsqueeze(2) & text.unsqueeze(1))
        return self.decoder_norm(y) @ self.words.weight.t() + self.bias


def _fused(parts: list[Tensor]) -> Tensor:
    """Rows in our order: for each head, its part of each projection."""
    return torch.stack([part.unflatten(0, (HEADS, -1)) for part in parts], dim=1).flatten(0, 2)


def _pairs(theirs: PlainT5) -> dict[str, list[Tensor]]:
    """Our parameters' names, and those of theirs that each is made of."""
    found: dict[str, list[Tensor]] = {
        "embedding.word_embeddings.weight": [theirs.words.weight],
        "embedding.position_embeddings.weight": [theirs.places.weight],
        "lm_head.bias": [theirs.bias],
    }
    modules: dict[str, list[Any]] = {
        "encoder_final_layernorm": [theirs.encoder_norm],
        "final_layernorm": [theirs.decoder_norm],
    }
    for number, layer in enumerate([*theirs.encoder, *theirs.decoder]):
        mine, own = f"layers.{number}", layer.attention
        modules |= {
            f"{mine}.input_layernorm": [layer.norm1],
            f"{mine}.self_attention.query_key_value": [own.q, own.k, own.v],
            f"{mine}.self_attention.dense": [own.out],
            f"{mine}.mlp.dense_h_to_4h": [layer.up],
            f"{mine}.mlp.dense_4h_to_h": [layer.down],
        }
        if layer.cross is None:
            modules[f"{mine}.post_attention_layernorm"] = [layer.norm2]
            continue
        modules |= {
            f"{mine}.post_attention_layernorm": [layer.norm3],
            f"{mine}.cross_attention.query": [layer.cross.q],
            f"{mine}.cross_attention.key_value": [layer.cross.k, layer.cross.v],
            f"{mine}.cross_attention.dense": [layer.cross.out],
            f"{mine}.post_cross_attention_layernorm": [layer.norm2],
        }
    for name, parts in modules.items():
        found |= {f"{name}.{kind}": [getattr(part, kind) for part in parts] for kind in ("weight", "bias")}
    return found


def _ours(**model: Any) -> T5Stage:
    # A padded vocabulary: padding must change nothing.
    changes = {"model": {**T5["model"], "make_vocab_size_divisible_by": 64, **SIZES, **model}, "precision": FP64}
    stage = tiny_engines({**T5, **changes}).stages[0]
    assert isinstance(stage, T5Stage)
    return stage


FP64 = {"fp64": True}


def _context(given: dict[str, Tensor]) -> ForwardContext:
    return ForwardContext(
        segment_ids_bs=given["segment_ids_bs"],
        decoder_tokens_bs=given["decoder_tokens_bs"],
        decoder_segment_ids_bs=given["decoder_segment_ids_bs"],
    )


def _assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-10, f"{name}: relative error {error:.2e}"


def _alike() -> tuple[PlainT5, T5Stage]:
    """Both models with the same weights, of which none keeps a value that would hide a mistake."""
    torch.manual_seed(0)
    theirs, ours = PlainT5().double(), _ours()
    params, pairs = dict(ours.named_parameters()), _pairs(theirs)
    assert set(pairs) == set(params)
    with torch.no_grad():
        for part in theirs.parameters():
            part.add_(torch.randn_like(part), alpha=0.1)
        for name, parts in pairs.items():
            value = _fused(parts) if len(parts) > 1 else parts[0]
            params[name][: value.shape[0]].copy_(value)
    return theirs, ours


def test_logits_loss_and_gradients_are_those_of_a_plain_t5() -> None:
    theirs, ours = _alike()
    given = tiny_spans(range(4), LENGTH, SHORT)
    mask_bs, own_bs = given["loss_mask_bs"], given["decoder_segment_ids_bs"] == 0
    assert not own_bs.all(), "no decoder is padded"
    assert (given["segment_ids_bs"] == 1).any(), "no encoder is padded"
    logits_bsv = theirs(given)
    losses = F.cross_entropy(logits_bsv.flatten(0, 1), given["labels_bs"].flatten(), reduction="none")
    expected = (losses * mask_bs.flatten()).sum() / mask_bs.sum()
    expected.backward()

    x_sbh = ours(given["tokens_bs"], _context(given))
    targets = Targets(given["labels_bs"], mask_bs)
    loss = ours.loss(x_sbh, targets, ours.counts(targets).double())
    loss.objective.backward()
    (one,) = loss.sums
    assert float(one.total / one.count) == pytest.approx(expected.item(), rel=1e-10)
    _assert_close("logits", ours.logits(x_sbh.detach()).transpose(0, 1)[own_bs], logits_bsv.detach()[own_bs])
    params = dict(ours.named_parameters())
    for name, parts in _pairs(theirs).items():
        gradients = [part.grad for part in parts if part.grad is not None]
        gradient, actual = _fused(gradients) if len(parts) > 1 else gradients[0], params[name].grad
        assert actual is not None
        if name.endswith(("query_key_value.bias", "key_value.bias")):
            # A key's bias changes no probability: its gradient is nothing but rounding.
            gradient, actual = (_without_keys(x, name) for x in (gradient, actual))
        _assert_close(name, actual[: gradient.shape[0]], gradient)
        assert not actual[gradient.shape[0] :].any(), f"{name}: the vocabulary's padding got a gradient"


def _without_keys(bias: Tensor, name: str) -> Tensor:
    parts = bias.view(HEADS, -1, HIDDEN // HEADS)
    return parts[:, [0, 2]] if name.endswith("query_key_value.bias") else parts[:, [1]]


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["sdpa", "written out"])
def test_the_decoder_sees_earlier_tokens_and_all_of_the_text(dropout: float) -> None:
    given = tiny_spans([3], LENGTH, SHORT)
    stage = _ours(attention_dropout=dropout)
    text, own = (int((given[name] == 0).sum()) for name in ("segment_ids_bs", "decoder_segment_ids_bs"))
    assert text < LENGTH
    assert own < SHORT
    before = stage(given["tokens_bs"], _context(given))
    assert before.isfinite().all()
    for name, length in (("tokens_bs", LENGTH), ("decoder_tokens_bs", SHORT)):
        for place in range(length):
            other = {**given, name: given[name].clone()}
            other[name][0, place] = (other[name][0, place] + 1) % VOCAB
            changed = (stage(other["tokens_bs"], _context(other)) != before).any(dim=2)[:own, 0]
            if name == "tokens_bs":
                assert changed.all() if place < text else not changed.any(), place
            else:
                assert changed.tolist() == [place <= later for later in range(own)], place


def _step(batches: list[Batch], micro: int) -> tuple[dict[str, float], float | None]:
    training = {"micro_batch_size": micro, "global_batch_size": 4}
    engines = tiny_engines({**T5, "training": training, "precision": FP64})
    metrics = train_step(engines, batches, 0, 1e-3, 0.0)
    return dict(metrics.losses), metrics.grad_norm


def test_the_loss_is_the_mean_over_the_global_batch() -> None:
    given, ids = tiny_spans(range(4), LENGTH, SHORT), torch.arange(4)
    together = _step([Batch(sample_ids_b=ids, draw_ids_b=ids, **given)], 4)
    single = [
        Batch(sample_ids_b=ids[n : n + 1], draw_ids_b=ids[n : n + 1], **{k: v[n : n + 1] for k, v in given.items()})
        for n in range(4)
    ]
    apart = _step(single, 1)
    assert apart[0] == pytest.approx(together[0], rel=1e-12)
    assert apart[1] == pytest.approx(together[1], rel=1e-12)
    stage = tiny_engines({**T5, "precision": FP64}).stages[0]
    targets = Targets(given["labels_bs"], given["loss_mask_bs"])
    stage.loss(stage(given["tokens_bs"], _context(given)), targets, stage.counts(targets)).objective.backward()
    norm = torch.stack([param.grad.norm() for param in stage.parameters() if param.grad is not None]).norm()
    assert together[1] == pytest.approx(float(norm), rel=1e-12)


def test_the_pipeline_is_split_where_it_is_asked_for() -> None:
    stages = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_split_rank": 1}
    model = {**T5["model"], "num_layers": 2, "decoder_num_layers": 6}
    config = tiny_config({**T5, "model": model, "parallel": stages}, 4)
    layout = layout_of(config, 4)
    held = [stage_layers(config.model, layout, stage) for stage in range(4)]
    assert held == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert boundary_lengths(config.model, layout, LENGTH) == [LENGTH, LENGTH + SHORT, LENGTH + SHORT]


def test_operations_are_counted() -> None:
    """As torch counts those of a plain T5 that attends to everything, of which we count what the masks let through."""
    from torch.utils.flop_counter import FlopCounterMode

    theirs, given = PlainT5(), tiny_spans([0], LENGTH, SHORT)
    with FlopCounterMode(display=False) as counter:
        theirs(given)
    model = tiny_engines({**T5, "model": {**T5["model"], **SIZES}}).config
    shape = model_shape(model, VOCAB)
    assert 3 * counter.get_total_flops() == model_flops_per_sample(shape, causal=False)
    later = DECODER * 2 * (SHORT * (SHORT - 1) // 2) * HIDDEN
    assert model_flops_per_sample(shape) == model_flops_per_sample(shape, causal=False) - 6 * later

"""TFLOPs by the benchmark's formula, and by the operations that a model performs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.model import ModelConfig
from megatron.kernels.products import own_products
from megatron.models.context import ForwardContext
from megatron.models.flops import benchmark_tflops, model_flops_per_sample, model_flops_utilization, model_tflops
from megatron.models.losses import Targets
from tests.support.tiny import tiny_engines


def _model(layers: int, hidden: int, ffn: int, heads: int, groups: int, kv: int, seq: int, **form: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=kv,
        seq_length=seq,
        **form,
    )


GPT_175B = _model(96, 12288, 49152, 96, 96, 128, 2048), 51200
GPT_13B = _model(40, 5120, 20480, 32, 32, 160, 2048), 50432
TINY, VOCAB = (3, 24, 40, 4, 2, 10, 16), 96


def test_published_figures_of_the_benchmark() -> None:
    tflops = benchmark_tflops(*GPT_175B, global_batch_size=96, seconds=5.3247, world_size=384, recompute=True)
    assert tflops == pytest.approx(137.89, abs=0.005)
    tflops = benchmark_tflops(*GPT_13B, global_batch_size=1024, seconds=34.9991, world_size=32, recompute=True)
    assert tflops == pytest.approx(203.96, abs=0.005)
    tflops = benchmark_tflops(*GPT_175B, global_batch_size=96, seconds=5.3247, world_size=384, recompute=False)
    assert tflops == pytest.approx(103.4, abs=0.05)


def test_the_benchmark_counts_a_third_more_for_swiglu() -> None:
    model, vocab = GPT_13B
    plain, gated = (
        benchmark_tflops(form, vocab, global_batch_size=8, seconds=1.0, world_size=4, recompute=False)
        for form in (model, dataclasses.replace(model, swiglu=True))
    )
    assert gated / plain == pytest.approx(32 / 24)


def test_both_counts_differ_by_a_quarter_of_the_logits() -> None:
    """For a plain model at 4h with full attention and without recomputation."""
    honest = model_tflops(*GPT_175B, global_batch_size=96, seconds=5.3247, world_size=384, causal=False)
    bench = benchmark_tflops(*GPT_175B, global_batch_size=96, seconds=5.3247, world_size=384, recompute=False)
    logits = 6 * 96 * 2048 * 12288 * 51200 / (5.3247 * 384 * 1e12)
    assert honest == pytest.approx(bench + logits / 4, rel=1e-12)


class TinyModel(torch.nn.Module):
    """The matrix products of a transformer for a single sample."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        h, heads, kv = shape.hidden_size, shape.num_attention_heads, shape.kv_channels
        self.shape = shape
        self.embedding = torch.nn.Embedding(VOCAB, h)
        self.layers = [
            torch.nn.ModuleDict(
                {
                    "q": torch.nn.Linear(h, heads * kv),
                    "kv": torch.nn.Linear(h, 2 * shape.num_query_groups * kv),
                    "out": torch.nn.Linear(heads * kv, h),
                    "up": torch.nn.Linear(h, shape.ffn_hidden_size * (2 if shape.gated else 1)),
                    "down": torch.nn.Linear(shape.ffn_hidden_size, h),
                }
            )
            for _ in range(shape.num_layers)
        ]
        self.logits = torch.nn.Linear(h, VOCAB, bias=False)

    def forward(self, tokens_s: torch.Tensor) -> torch.Tensor:
        shape, s = self.shape, tokens_s.numel()
        x_sh = self.embedding(tokens_s)
        for layer in self.layers:
            q = layer["q"](x_sh).view(s, shape.num_attention_heads, shape.kv_channels).transpose(0, 1)
            k, v = layer["kv"](x_sh).view(s, 2, shape.num_query_groups, shape.kv_channels).unbind(1)
            share = shape.num_attention_heads // shape.num_query_groups
            k, v = (t.repeat_interleave(share, dim=1).transpose(0, 1) for t in (k, v))
            context = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
            x_sh = x_sh + layer["out"](context.transpose(0, 1).reshape(s, -1))
            up = layer["up"](x_sh)
            if shape.gated:
                gate, value = up.chunk(2, -1)
                up = torch.nn.functional.silu(gate) * value
            x_sh = x_sh + layer["down"](up)
        logits_sv: torch.Tensor = self.logits(x_sh)
        return logits_sv


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_count_is_torchs_count(swiglu: bool, groups: int) -> None:
    config = _model(3, 24, 40, 4, groups, 10, 16, swiglu=swiglu)
    model = TinyModel(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(VOCAB, (16,))).sum().backward()
    assert model_flops_per_sample(config, VOCAB, causal=False) == counter.get_total_flops()


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_causal_attention_counts_the_pairs_of_the_mask(window: int | None) -> None:
    model = _model(*TINY, sliding_window=window)
    pairs = int(torch.ones(16, 16).tril().triu(1 - (window or 16)).sum())
    masked_pairs = 16 * 16 - pairs
    difference = model_flops_per_sample(model, VOCAB, causal=False) - model_flops_per_sample(model, VOCAB)
    assert difference == 3 * 3 * 4 * masked_pairs * 4 * 10


@pytest.mark.parametrize("count", [0, 1, 3])
def test_layers_without_the_window_count_in_full(count: int) -> None:
    with_all = model_flops_per_sample(_model(*TINY, sliding_window=5), VOCAB)
    with_none = model_flops_per_sample(_model(*TINY), VOCAB)
    pattern = [int(layer < count) for layer in range(3)]
    flops = model_flops_per_sample(_model(*TINY, sliding_window=5, window_attn_skip_freq=pattern), VOCAB)
    assert 3 * flops == count * with_all + (3 - count) * with_none


def test_utilization() -> None:
    assert model_flops_utilization(103.4, 312.0) == pytest.approx(0.3314, abs=1e-4)
    with pytest.raises(ValueError, match="positive"):
        model_flops_utilization(1.0, 0.0)


@pytest.mark.parametrize(("buckets", "kernel"), [(6, 0), (8, 3)])
def test_the_count_of_a_deberta(buckets: int, kernel: int) -> None:
    """Includes relative distances and the convolution; not the table, once per step, nor the head, once per sample."""
    shape = {"position_buckets": buckets, "conv_kernel_size": kernel, "task_head": "classification", "task_classes": 3}
    engines = tiny_engines({"model": {"model_type": "deberta", **shape}})
    model, (stage,) = engines.config.model, engines.stages
    tokens_bs, labels = torch.randint(90, (1, model.seq_length)), torch.zeros(1, 1, dtype=torch.int64)
    targets = Targets(labels, torch.ones(1, 1), lengths_b=torch.tensor([model.seq_length]))
    own_products()  # loads the kernels, whose formulas a counter knows that is made later
    with FlopCounterMode(display=False) as counter:
        stage.loss(stage(tokens_bs, ForwardContext()), targets).objective.backward()
    h, rows = model.hidden_size, 2 * model.relative_span
    uncounted = 6 * (model.num_layers * rows * h * 2 * h + h * h + h * 3)
    counted = model_flops_per_sample(model, engines.padded_vocab_size)
    assert counted == counter.get_total_flops() - uncounted
    wide = dataclasses.replace(model, position_buckets=1000)
    most = dataclasses.replace(model, position_buckets=model.seq_length)
    assert model_flops_per_sample(wide, 0) == model_flops_per_sample(most, 0)

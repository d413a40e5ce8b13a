"""Floating-point operations of training: the benchmark's formula, and a count of the model's own operations.

The benchmark's figure is kept because published tables use it. It counts a fourth forward pass for any kind of
recomputation (too much for selective recomputation), three quarters of the logits without recomputation, attention
over the masked half, keys and values of all heads even with grouped queries, and a feed-forward width of 4h regardless
of the actual width. ``model_flops_per_sample`` counts the model's operations.
"""

from __future__ import annotations

from megatron.config.model import ModelConfig


def benchmark_tflops(
    model: ModelConfig,
    padded_vocab_size: int,
    *,
    global_batch_size: int,
    seconds: float,
    world_size: int,
    recompute: bool,
) -> float:
    """TFLOP/s per device as defined by the JUPITER benchmark.

    C*F*B*s*L*h^2 * (1 + s/(6h) + V/(16Lh)) / (t * world * 1e12), with C = 32 for a gated MLP and 24 otherwise, F = 4
    with any kind of recomputation and 3 otherwise, V the padded vocabulary and t the seconds of an iteration. For an
    encoder-decoder it uses the encoder's s and L, as Megatron does.
    """
    s, layers, h = model.seq_length, model.num_layers, model.hidden_size
    vocab = padded_vocab_size if model.predicts_words else 0
    per_layer = 32 if model.gated else 24
    passes = 4 if recompute else 3
    flops = per_layer * passes * global_batch_size * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flops / (seconds * world_size * 1e12)


def model_flops_per_sample(model: ModelConfig, padded_vocab_size: int, *, causal: bool = True) -> int:
    """Operations that the model itself needs for a training sample (forward and backward of ``seq_length`` tokens).

    A multiply-add counts as two operations. The count covers the matrix products: query, key and value (key and value
    per query group), attention scores and context, the attention's output, the feed-forward network at its real width
    (three matrices with a gate), and the logits over the padded vocabulary. The backward pass costs two forward passes.
    Recomputation, embedding lookup, normalization, softmax and the optimizer are not counted.

    Attention counts the pairs that the mask allows: s(s+1)/2, or fewer within a sliding window, and all pairs if tokens
    attend to later tokens, too. ``causal=False`` counts all s*s pairs anyway, as many published figures do. A decoder
    layer attends to the decoder's earlier tokens and to all of the encoder's tokens, for which it computes keys and
    values. Only the experts that a token is routed to count. Disentangled attention multiplies queries and keys by the
    vectors of the distances in a sample; projecting those vectors is a cost per step, not per sample.
    """
    s, h = model.seq_length, model.hidden_size
    feed_forward = (3 if model.gated else 2) * h * model.ffn_hidden_size
    pairs = sum(_pairs(s, model.window_of(layer), causal and model.causal) for layer in range(model.num_layers))
    layers = model.num_layers * s * model.attention_products + pairs * model.pair_products
    # Layers with experts: experts, router, and shared or residual network.
    shared = model.ffn_hidden_size if model.mlp_type == "residual" else model.moe_shared_expert_intermediate_size or 0
    width = model.moe_router_topk * (model.moe_ffn_hidden_size or 0) + shared
    mixing = 2 if model.mlp_type == "residual" else int(model.moe_shared_expert_gate)
    expert_width = (3 if model.gated else 2) * width + mixing
    expert_products = sum(h * (expert_width + count) for count in model.expert_layers.values())
    layers += s * ((model.num_layers - len(model.expert_layers)) * feed_forward + expert_products)
    if model.shares_distances:
        layers += model.num_layers * s * min(2 * model.relative_span, 2 * s - 1) * model.pair_products
        layers += s * h * h * model.conv_kernel_size
    if model.decoder_layers:
        d = model.labels_of(s)
        self_pairs = d * (d + 1) // 2 if causal else d * d
        cross = 2 * h * model.kv_channels * (d * model.num_attention_heads + s * model.num_query_groups)
        layer = d * (model.attention_products + feed_forward) + cross + (self_pairs + d * s) * model.pair_products
        layers += len(model.decoder_layers) * layer
    head = 0
    if model.predicts_words:
        head = model.labels_of(s) * h * (padded_vocab_size + (h if model.model_type == "bert" else 0))
    return 3 * 2 * (layers + head)


def _pairs(s: int, window: int | None, causal: bool) -> int:
    """Pairs of tokens that a layer's mask allows."""
    span = min(window or s, s)
    return span * (span + 1) // 2 + (s - span) * span if causal else s * s


def model_tflops(
    model: ModelConfig,
    padded_vocab_size: int,
    *,
    global_batch_size: int,
    seconds: float,
    world_size: int,
    causal: bool = True,
) -> float:
    """Model TFLOP/s per device: the model's own FLOPs over the time of an iteration."""
    flops = model_flops_per_sample(model, padded_vocab_size, causal=causal)
    return flops * global_batch_size / (seconds * world_size * 1e12)


def model_flops_utilization(tflops: float, peak_tflops: float) -> float:
    """MFU: model TFLOP/s per device over the device's peak at the precision used, from 0 to 1."""
    if peak_tflops <= 0:
        raise ValueError(f"the peak rate must be positive, got {peak_tflops}")
    return tflops / peak_tflops

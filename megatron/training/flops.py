"""Floating-point operations of training: the benchmark's formula, and a count of the model's own operations.

The benchmark's figure is kept because published tables use it. It counts a fourth forward pass for any kind of
recomputation (too much for selective recomputation), three quarters of the logits without recomputation, attention
over the masked half, keys and values of all heads even with grouped queries, and a feed-forward width of 4h regardless
of the actual width. ``model_flops_per_sample`` counts the model's operations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer that decide its FLOPs.

    Args:
        window_layers: number of layers with the sliding window; None for all.
        gated: the feed-forward network has a gate, as in SwiGLU and GeGLU.
        causal: a token attends to earlier tokens only.
        head_transform: a product of width h comes before the logits, as in BERT.
        expert_layers: number of layers with experts in place of the feed-forward network.
        expert_products: multiply-adds of a token in all expert layers: experts, router, and shared or residual network.
        decoder_layers, decoder_seq_length: layers and tokens of an additional decoder, which reads the encoder's output
            and computes the logits in its place; 0 without a decoder.
        relative_span: distances in one direction with their own vectors, in disentangled attention; 0 without.
        conv_kernel_size: tokens of a convolution beside the first layer; 0 without.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    padded_vocab_size: int
    gated: bool = False
    sliding_window: int | None = None
    window_layers: int | None = None
    causal: bool = True
    head_transform: bool = False
    expert_layers: int = 0
    expert_products: int = 0
    decoder_layers: int = 0
    decoder_seq_length: int = 0
    relative_span: int = 0
    conv_kernel_size: int = 0


def benchmark_tflops(
    shape: ModelShape, *, global_batch_size: int, seconds: float, world_size: int, recompute: bool
) -> float:
    """TFLOP/s per device as defined by the JUPITER benchmark.

    C*F*B*s*L*h^2 * (1 + s/(6h) + V/(16Lh)) / (t * world * 1e12), with C = 32 for a gated MLP and 24 otherwise, F = 4
    with any kind of recomputation and 3 otherwise, V the padded vocabulary and t the seconds of an iteration. For an
    encoder-decoder it uses the encoder's s and L, as Megatron does.
    """
    s, layers, h, vocab = shape.seq_length, shape.num_layers, shape.hidden_size, shape.padded_vocab_size
    per_layer = 32 if shape.gated else 24
    passes = 4 if recompute else 3
    flops = per_layer * passes * global_batch_size * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flops / (seconds * world_size * 1e12)


def model_flops_per_sample(shape: ModelShape, *, causal: bool = True) -> int:
    """Operations that the model itself needs for a training sample (forward and backward of ``seq_length`` tokens).

    A multiply-add counts as two operations. Counted are the matrix products: query, key and value (key and value per
    query group), attention scores and context, the attention's output, the feed-forward network at its real width
    (three matrices with a gate), and the logits over the padded vocabulary. The backward pass costs two forward passes.
    Not counted: recomputation, embedding lookup, normalization, softmax, the optimizer.

    Attention counts the pairs that the mask allows: s(s+1)/2, or fewer within a sliding window, and all pairs if tokens
    attend to later tokens, too. ``causal=False`` counts all s*s pairs anyway, as many published figures do. A decoder
    layer attends to the decoder's earlier tokens and to all of the encoder's tokens, for which it computes keys and
    values. Of a layer's experts, only those that a token is routed to count. Disentangled attention multiplies queries
    and keys by the vectors of the distances in a sample; projecting those vectors is a cost per step, not per sample.
    """
    s, h = shape.seq_length, shape.hidden_size
    q_width = shape.num_attention_heads * shape.kv_channels
    kv_width = shape.num_query_groups * shape.kv_channels
    projections = h * (q_width + 2 * kv_width) + q_width * h
    feed_forward = (3 if shape.gated else 2) * h * shape.ffn_hidden_size
    windowed = shape.num_layers if shape.window_layers is None else shape.window_layers
    each = {shape.sliding_window: windowed, None: shape.num_layers - windowed}
    if not (causal and shape.causal and shape.sliding_window):
        each = {None: shape.num_layers}
    pairs = sum(count * _pairs(s, window, causal and shape.causal) for window, count in each.items())
    layers = shape.num_layers * s * projections + 2 * pairs * q_width
    layers += s * ((shape.num_layers - shape.expert_layers) * feed_forward + shape.expert_products)
    layers += shape.num_layers * 2 * s * min(2 * shape.relative_span, 2 * s - 1) * q_width
    layers += s * h * h * shape.conv_kernel_size
    if shape.decoder_layers:
        d = shape.decoder_seq_length
        self_pairs = d * (d + 1) // 2 if causal else d * d
        reading = 2 * d * q_width * h + 2 * s * kv_width * h
        layer = d * (projections + feed_forward) + reading + 2 * (self_pairs + d * s) * q_width
        layers += shape.decoder_layers * layer
    labels = shape.decoder_seq_length if shape.decoder_layers else s
    head = labels * h * (shape.padded_vocab_size + (h if shape.head_transform else 0))
    return 3 * 2 * (layers + head)


def _pairs(s: int, window: int | None, causal: bool) -> int:
    """Pairs of tokens that a layer's mask allows."""
    span = min(window or s, s)
    return span * (span + 1) // 2 + (s - span) * span if causal else s * s


def model_tflops(
    shape: ModelShape, *, global_batch_size: int, seconds: float, world_size: int, causal: bool = True
) -> float:
    """Model TFLOP/s per device: the model's own FLOPs over the time of an iteration."""
    return model_flops_per_sample(shape, causal=causal) * global_batch_size / (seconds * world_size * 1e12)


def model_flops_utilization(tflops: float, peak_tflops: float) -> float:
    """MFU: model TFLOP/s per device over the device's peak at the precision used, from 0 to 1."""
    if peak_tflops <= 0:
        raise ValueError(f"the peak rate must be positive, got {peak_tflops}")
    return tflops / peak_tflops

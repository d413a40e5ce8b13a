"""Floating-point operations of training: the benchmark's formula, and an honest count.

The benchmark's figure is kept because published tables use it. It counts a fourth forward pass for every kind
of recomputation (too much for the selective one), three quarters of the logits when there is none, attention
over the masked half, a key and value per head even with grouped queries, and a feed-forward width of 4h
whatever the real one is. ``model_flops_per_sample`` counts what the model needs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer that decide its FLOPs.

    Args:
        window_layers: how many of the layers have the sliding window; None for all.
        gated: the feed-forward network has a gate, as SwiGLU and GeGLU do.
        causal: a token attends to earlier ones alone.
        head_transform: a product of width h comes before the logits, as in BERT.
        expert_layers: how many of the layers have experts in place of the feed-forward network.
        expert_products: multiply-adds of a token in all of these: of its experts, of the router, and of what is beside.
        decoder_layers, decoder_seq_length: layers and tokens of a decoder beside these, which reads them and computes
            the logits in their place; 0 where there is none.
        relative_span: distances in one direction that have a vector of their own, in disentangled attention; 0 without.
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
    """TFLOP/s per device as the JUPITER benchmark defines them.

    C*F*B*s*L*h^2 * (1 + s/(6h) + V/(16Lh)) / (t * world * 1e12), with C = 32 for a gated MLP and 24 otherwise, F =
    4 under any kind of recomputation and 3 otherwise, V the padded vocabulary and t the seconds of one
    iteration. Of an encoder-decoder it counts the encoder's s and L, as Megatron does.
    """
    s, layers, h, vocab = shape.seq_length, shape.num_layers, shape.hidden_size, shape.padded_vocab_size
    per_layer = 32 if shape.gated else 24
    passes = 4 if recompute else 3
    flops = per_layer * passes * global_batch_size * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flops / (seconds * world_size * 1e12)


def model_flops_per_sample(shape: ModelShape, *, causal: bool = True) -> int:
    """Operations of one training sample (forward and backward of ``seq_length`` tokens) that the model itself
    needs.

    A multiply-add counts as two. Counted are the matrix products: query, key and value (of the query groups
    only), attention scores and context, the attention's output, the feed-forward network at its real width
    (three matrices with a gate), and the logits over the padded vocabulary. The backward pass costs two
    forward passes. Not counted: recomputation, embedding lookup, normalization, softmax, the optimizer.

    Attention counts the pairs that the mask lets through: s(s+1)/2, or fewer within a sliding window, and all of them
    where a token attends to later ones, too. ``causal=False`` counts all s*s pairs anyway, which is what many
    published figures do. A decoder's layers attend to their own tokens, earlier ones alone, and to all of the
    encoder's, of which each computes keys and values. Of a layer's experts those that a token goes to count.
    Disentangled attention multiplies queries, and keys, by the vectors of the distances in a sample; to project these
    is a matter of the step, not of the sample.
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
        own = d * (d + 1) // 2 if causal else d * d
        reading = 2 * d * q_width * h + 2 * s * kv_width * h
        layer = d * (projections + feed_forward) + reading + 2 * (own + d * s) * q_width
        layers += shape.decoder_layers * layer
    labels = shape.decoder_seq_length if shape.decoder_layers else s
    head = labels * h * (shape.padded_vocab_size + (h if shape.head_transform else 0))
    return 3 * 2 * (layers + head)


def _pairs(s: int, window: int | None, causal: bool) -> int:
    """Pairs of tokens that the mask of a layer lets through."""
    seen = min(window or s, s)
    return seen * (seen + 1) // 2 + (s - seen) * seen if causal else s * s


def model_tflops(
    shape: ModelShape, *, global_batch_size: int, seconds: float, world_size: int, causal: bool = True
) -> float:
    """Honest TFLOP/s per device: the model's FLOPs over the time of one iteration."""
    return model_flops_per_sample(shape, causal=causal) * global_batch_size / (seconds * world_size * 1e12)


def model_flops_utilization(tflops: float, peak_tflops: float) -> float:
    """MFU: honest TFLOP/s per device over the device's peak at the precision used, from 0 to 1."""
    if peak_tflops <= 0:
        raise ValueError(f"the peak rate must be positive, got {peak_tflops}")
    return tflops / peak_tflops

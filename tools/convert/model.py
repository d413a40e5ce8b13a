"""What every format is turned into and made from: a description, and tensors that are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class Entry:
    """A tensor somewhere.

    Args:
        shape, dtype: as ``read`` will return it.
        read: gets it; each call reads it anew, so that nobody has to keep it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def to(self, dtype: torch.dtype | None) -> Entry:
        """The same in another precision."""
        if dtype is None or dtype == self.dtype:
            return self
        return Entry(self.shape, dtype, lambda: self.read().to(dtype))


@dataclass(frozen=True)
class Weights:
    """A trained model.

    Args:
        model: its resolved form.
        vocab_size: entries of the vocabulary, without padding.
        entries: its tensors, by logical name, whole and without padding.
        tokenizer: what its tokenizer was built from.
        iteration: of the run that it is from.
    """

    model: ModelConfig
    vocab_size: int
    entries: Mapping[str, Entry]
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    iteration: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in self.entries.values())


def expected_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Logical names and shapes of a model's parameters, in the order of the forward pass."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    width = model.num_attention_heads * model.kv_channels
    rows = width + 2 * model.num_query_groups * model.kv_channels
    up = (2, ffn) if model.swiglu else (ffn,)
    norm = {"weight": (h,)} if model.normalization == "RMSNorm" else {"weight": (h,), "bias": (h,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocab_size, h)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (model.max_position_embeddings, h)
    for number in range(model.num_layers):
        at = f"layers.{number}."
        layer: dict[str, tuple[int, ...]] = {f"input_layernorm.{kind}": shape for kind, shape in norm.items()}
        layer |= {"self_attention.query_key_value.weight": (rows, h), "self_attention.query_key_value.bias": (rows,)}
        layer |= {"self_attention.dense.weight": (h, width), "self_attention.dense.bias": (h,)}
        layer |= {f"post_attention_layernorm.{kind}": shape for kind, shape in norm.items()}
        layer |= {"mlp.dense_h_to_4h.weight": (*up, h), "mlp.dense_h_to_4h.bias": up}
        layer |= {"mlp.dense_4h_to_h.weight": (h, ffn), "mlp.dense_4h_to_h.bias": (h,)}
        for name, shape in layer.items():
            if model.add_bias_linear or not name.endswith("bias") or "layernorm" in name:
                shapes[at + name] = shape
    shapes |= {f"final_layernorm.{kind}": shape for kind, shape in norm.items()}
    if model.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = (vocab_size, h)
    return shapes


def model_of(**values: object) -> ModelConfig:
    """A resolved model configuration, from the values that are not defaults."""
    model = ModelConfig(**values)  # type: ignore[arg-type]
    training = TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1)
    optimizer, tokenizer = OptimizerConfig(lr=1e-4), TokenizerConfig(vocab_size=1)
    return RunConfig(model=model, training=training, optimizer=optimizer, tokenizer=tokenizer).resolve(1).model

"""Reads our own checkpoints as weights, and writes weights as a checkpoint without optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron.base.errors import UserError
from megatron.checkpoint.files import Iteration
from megatron.checkpoint.load import saved_config
from megatron.checkpoint.logical import LogicalShard, TensorBox
from megatron.checkpoint.model_state import MAIN, MODEL
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.stored import StoredTensors
from megatron.checkpoint.vocabulary import saved_vocab_size
from megatron.config.precision import PrecisionConfig
from megatron.config.run import minimal_run_config
from megatron.convert.model import Entry, Weights
from megatron.models.embedding import TIED_NAME
from megatron.tokenizer.vocabulary import fit_vocab_size


def read_ours(root: Path, iteration: Iteration | None = None, precise: bool = False) -> Weights:
    """Read a checkpoint of any layout.

    Args:
        root: the folder that ``--save`` wrote to.
        iteration: iteration of the checkpoint; None for the newest.
        precise: read the optimizer's fp32 values of lower-precision weights, if the checkpoint has them.

    Raises:
        UserError: when there is no checkpoint, it is damaged, or no other format supports its type of model.
    """
    config, chosen = saved_config(root, iteration, "--iteration")
    if config.model.decoder_layers:
        raise UserError(
            f"--load {root} holds a model of type {config.model.model_type}, which no other format supports; keep "
            "it in ours, which any layout loads"
        )
    stored = StoredTensors(root, chosen)
    tensors = stored.manifest.tensors
    names = [name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)]
    sources = {name: MAIN + name if precise and MAIN + name in tensors else MODEL + name for name in names}
    entries = {
        name: Entry(tuple(tensors[source].size), tensors[source].properties.dtype, partial(stored.read, source))
        for name, source in sources.items()
    }
    number = chosen if isinstance(chosen, int) else 0
    return Weights(config.model, saved_vocab_size(root, chosen), entries, config.tokenizer, number)


class LazyShard(LogicalShard):
    """A whole tensor that is read only at the moment it is written."""

    def __init__(self, entry: Entry, advance: Callable[[int], object]) -> None:
        box = TensorBox((0,) * len(entry.shape), torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        super().__init__(entry.shape, entry.dtype, [box])
        self.entry = entry
        self.advance = advance

    def view(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read the whole tensor."""
        tensor = self.entry.read()
        self.advance(tensor.numel() * tensor.element_size())
        return tensor


def write_ours(weights: Weights, root: Path, advance: Callable[[int], object]) -> None:
    """Write a checkpoint that ``pretrain_gpt.py --load DIR --finetune`` and the generation tools load.

    Args:
        weights: weights to write.
        root: folder of the checkpoint.
        advance: called with the number of bytes of each tensor written.

    Raises:
        UserError: when it cannot be written; nothing is left behind.
    """
    dtype = weights.entries[TIED_NAME].dtype
    precision = PrecisionConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    config = minimal_run_config(
        weights.model, tokenizer=fit_vocab_size(weights.tokenizer, weights.vocab_size), precision=precision
    )
    tensors: dict[str, LogicalShard] = {
        MODEL + name: LazyShard(entry, advance) for name, entry in weights.entries.items()
    }
    text = config.resolve(1).to_yaml()
    try:
        save_checkpoint(root, weights.iteration, tensors, {"separate_main": False}, text)
    except CheckpointException as error:  # torch wraps any exception, even Ctrl-C
        raise next(iter(error.failures.values()))[0] from error

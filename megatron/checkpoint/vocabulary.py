"""The size of a saved model's vocabulary."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import UserError
from megatron.checkpoint.files import Iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.model_state import MODEL

EMBEDDING = MODEL + "embedding.word_embeddings.weight"


def saved_vocab_size(root: str | Path, iteration: Iteration) -> int:
    """Number of vocabulary entries of a checkpoint's model, without padding.

    Raises:
        UserError: when the checkpoint is damaged, or holds no embedding.
    """
    folder, manifest = open_checkpoint(Path(root), iteration)
    if EMBEDDING not in manifest.tensors:
        raise UserError(f"{folder}: the checkpoint holds no {EMBEDDING}; name one of a GPT model")
    return int(manifest.tensors[EMBEDDING].size[0])

"""Pipeline split between encoder and decoder."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig

_FLAG = "--pipeline-model-parallel-split-rank"


def split_rank(configured: int | None, pipeline: int, model: ModelConfig) -> int | None:
    """First stage of the decoder, by default in the middle; None for a pipeline without a split."""
    if pipeline == 1 or not model.decoder_layers:
        return None
    return pipeline // 2 if configured is None else configured


def check_split(split: int, pipeline: int, model: ModelConfig) -> None:
    """Check that encoder and decoder divide evenly into their stages; raise UserError otherwise."""
    if not 0 < split < pipeline:
        possible = "1" if pipeline == 2 else f"1 to {pipeline - 1}"
        raise UserError(
            f"{_FLAG} {split} leaves the {'encoder' if split <= 0 else 'decoder'} none of the {pipeline} stages "
            f"(--pipeline-model-parallel-size); give {possible}"
        )
    stacks = (
        ("--num-layers", model.num_layers, split, "before"),
        ("--decoder-num-layers", len(model.decoder_layers), pipeline - split, "after"),
    )
    for flag, layers, stages, side in stacks:
        if layers % stages != 0:
            raise UserError(
                f"{flag} {layers} is not a multiple of the {stages} pipeline stages {side} {_FLAG} {split}; "
                "change one of them"
            )


def check_not_interleaved(chunks: int | None, per_chunk: int | None, model: ModelConfig) -> None:
    """Check that there are no virtual stages if the model does not support them.

    Raises UserError naming the flag that requests them.
    """
    reason = single_chunk_reason(model)
    for value, flag in (
        (per_chunk, "--num-layers-per-virtual-pipeline-stage"),
        (chunks, "--virtual-pipeline-model-parallel-size"),
    ):
        if value is not None and reason:
            raise UserError(f"{flag} {value}: {reason}; leave it out")


def single_chunk_reason(model: ModelConfig) -> str:
    """Reason why the model cannot have several chunks on a stage; empty if it can."""
    if model.decoder_layers:
        return (
            "a stage of an encoder-decoder holds layers of either the encoder or the decoder, and cannot hold several "
            "chunks"
        )
    if model.shares_distances:
        return "each stage of DeBERTa holds one copy of the embedding of distances, and its chunks would need several"
    return ""

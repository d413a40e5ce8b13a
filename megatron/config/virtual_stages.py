"""Virtual stages: several chunks of layers on each pipeline stage, interleaved or in V form."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.split import single_chunk_reason

_CHUNKS_FLAG = "--virtual-pipeline-model-parallel-size"
_LAYERS_FLAG = "--num-layers-per-virtual-pipeline-stage"
_V_FLAG = "--pipeline-schedule zb-v"


def resolve_virtual_stages(
    chunks: int | None, per_chunk: int | None, pipeline: int, model: ModelConfig
) -> tuple[int | None, int | None]:
    """Number of chunks on a stage and of layers in a chunk, each from the other; None without virtual stages.

    Args:
        chunks, per_chunk: --virtual-pipeline-model-parallel-size and --num-layers-per-virtual-pipeline-stage.
        pipeline: number of stages.
        model: the model, for its layers.

    Raises UserError if they do not fit.
    """
    layers_per_stage = model.num_layers // pipeline
    if per_chunk is not None:
        if layers_per_stage % per_chunk != 0:
            raise UserError(
                f"{_LAYERS_FLAG} {per_chunk} does not divide the {layers_per_stage} "
                "layers of a pipeline stage (--num-layers / --pipeline-model-parallel-size); choose a divisor"
            )
        if chunks is not None and chunks != layers_per_stage // per_chunk:
            raise UserError(
                f"{_LAYERS_FLAG} {per_chunk} makes {layers_per_stage // per_chunk} "
                f"chunks, not {_CHUNKS_FLAG} {chunks}; give only one of them"
            )
        return layers_per_stage // per_chunk, per_chunk
    if chunks is None:
        return None, None
    if layers_per_stage % chunks != 0:
        raise UserError(
            f"{_CHUNKS_FLAG} {chunks} does not divide the {layers_per_stage} "
            "layers of a pipeline stage (--num-layers / --pipeline-model-parallel-size); choose a divisor"
        )
    return chunks, layers_per_stage // chunks


def resolve_v_form(
    chunks: int | None, per_chunk: int | None, pipeline: int, model: ModelConfig
) -> tuple[int | None, int | None]:
    """Numbers of ``resolve_virtual_stages`` in V form, which has two chunks on each stage.

    Raises UserError where the model or another flag does not allow them.
    """
    reason = single_chunk_reason(model)
    if reason:
        raise UserError(f"{_V_FLAG}: {reason}; name another schedule")
    if model.num_layers % (2 * pipeline) != 0:
        raise UserError(
            f"{_V_FLAG}: --num-layers {model.num_layers} is not a multiple of {2 * pipeline}, two chunks on each of "
            f"--pipeline-model-parallel-size {pipeline} stages; change one of them, or name another schedule"
        )
    layers = model.num_layers // (2 * pipeline)
    for value, needed_value, flag in ((chunks, 2, _CHUNKS_FLAG), (per_chunk, layers, _LAYERS_FLAG)):
        if value not in (None, needed_value):
            raise UserError(
                f"{flag} {value}: {_V_FLAG} has two chunks on each stage, here with {layers} of the layers each; leave "
                "the flag out"
            )
    return 2, layers


def check_virtual_stages(chunks: int | None, per_chunk: int | None, pipeline: int, schedule: str) -> None:
    """Check that the schedule allows virtual stages, if there are any; raise UserError otherwise."""
    if chunks is None:
        return
    flag = f"{_LAYERS_FLAG} {per_chunk} ({_CHUNKS_FLAG} {chunks})"
    if pipeline < 2:
        raise UserError(f"{flag} needs --pipeline-model-parallel-size of at least 2; raise it or leave the flag out")
    if schedule not in ("1f1b", "zb-v"):
        raise UserError(f"{flag} needs --pipeline-schedule 1f1b, not {schedule}; change it or leave the flag out")
    if chunks < 2:
        raise UserError(f"{flag} leaves one chunk in each stage; choose fewer layers or leave the flag out")

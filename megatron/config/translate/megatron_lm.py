"""Translation of interdependent Megatron-LM flags."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.base.user_text import Note
from megatron.config.translate.rules import Dialect, ExplicitValues, SectionValues


@dataclass(frozen=True, kw_only=True)
class MegatronLMConfig:
    """Flags of Megatron-LM, translated."""

    grad_reduce_in_bf16: bool = option(False, "Same as --compress dp-grad=cast.")
    num_virtual_stages_per_pipeline_rank: int | None = derived(
        "unused",
        "Number of virtual stages of a rank, in place of --num-layers-per-virtual-pipeline-stage.",
        unit="stages",
        minimum=1,
    )


def _translate(theirs: SectionValues, explicit: ExplicitValues, note: Note) -> None:
    if theirs.grad_reduce_in_bf16:
        explicit["compression.compress"] = [*explicit.get("compression.compress", []), "dp-grad=cast"]
        note("--grad-reduce-in-bf16 means --compress dp-grad=cast")
    chunks = theirs.num_virtual_stages_per_pipeline_rank
    if chunks is None or chunks == 1:
        return
    flag = f"--num-virtual-stages-per-pipeline-rank {chunks}"
    layers, stages = explicit.get("model.num_layers"), explicit.get("parallel.pipeline_model_parallel_size") or 1
    if stages == 1:
        raise UserError(f"{flag} needs --pipeline-model-parallel-size of at least 2; add it or leave the flag out")
    if not layers or layers % (stages * chunks):
        raise UserError(f"{flag} needs --num-layers that is a multiple of {stages * chunks}, stages x virtual stages")
    path, per_stage = "parallel.num_layers_per_virtual_pipeline_stage", layers // (stages * chunks)
    theirs.set_field("num_virtual_stages_per_pipeline_rank", path, per_stage, flag)
    note(f"{flag} means --num-layers-per-virtual-pipeline-stage {per_stage}")


MEGATRON_LM = Dialect(section="megatron_lm", config=MegatronLMConfig, translate=_translate)

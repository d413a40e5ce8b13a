"""Shorthand flags: old names, and switches that set a field to a fixed value."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.base.user_text import Note
from megatron.config.translate.rules import ARGUMENT, VALUE, ExplicitValues, Shortcut, old_name

_POSITION = "model.position_embedding_type"
_SCALING = "model.rotary_scaling"
_RECIPES = {"hybrid": "tensorwise", "e4m3": "rowwise"}
"""fp8 formats by their Megatron-LM names, and the scaling recipe that uses them."""


def _without_position_embedding(explicit: ExplicitValues, note: Note) -> None:
    embedding_type = explicit.setdefault(_POSITION, "none")
    if embedding_type == "learned_absolute":
        raise UserError("--no-position-embedding contradicts --position-embedding-type learned_absolute; give only one")


def _needs_query_groups(explicit: ExplicitValues, note: Note) -> None:
    if explicit.get("model.num_query_groups") is None:
        raise UserError("--group-query-attention needs the number of groups; add --num-query-groups N")


def _needs_one_stage(explicit: ExplicitValues, note: Note) -> None:
    stages = explicit.get("parallel.pipeline_model_parallel_size") or 1
    if stages > 1:
        raise UserError(
            f"--no-pipeline-parallel contradicts --pipeline-model-parallel-size {stages}; leave one of them out"
        )


SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut(
        name="recompute-activations",
        help="Same as --recompute-granularity selective.",
        sets={"recompute.recompute_granularity": "selective"},
    ),
    Shortcut(
        name="checkpoint-activations",
        help="Same as --recompute-granularity full --recompute-method uniform.",
        sets={"recompute.recompute_granularity": "full", "recompute.recompute_method": "uniform"},
    ),
    Shortcut(
        name="activations-checkpoint-method",
        arity=VALUE,
        help="Same as --recompute-granularity full --recompute-method METHOD.",
        sets={"recompute.recompute_granularity": "full", "recompute.recompute_method": ARGUMENT},
    ),
    Shortcut(
        name="use-rotary-position-embeddings",
        help="Same as --position-embedding-type rope.",
        sets={_POSITION: "rope"},
    ),
    Shortcut(
        name="use-rope-scaling",
        help="Same as --rotary-scaling llama3.",
        sets={_SCALING: "llama3"},
    ),
    Shortcut(
        name="rotary-seq-len-interpolation-factor",
        arity=VALUE,
        help="Same as --rotary-scaling linear --rotary-scaling-factor FACTOR.",
        sets={_SCALING: "linear", "model.rotary_scaling_factor": ARGUMENT},
    ),
    Shortcut(
        name="no-position-embedding",
        help="No learned positions: --position-embedding-type none, unless rope is selected.",
        rule=_without_position_embedding,
    ),
    Shortcut(
        name="no-scatter-gather-tensors-in-pipeline",
        help="Whole messages, as without --scatter-gather-tensors-in-pipeline.",
        sets={"parallel.scatter_gather_tensors_in_pipeline": "false"},
        note="--no-scatter-gather-tensors-in-pipeline: messages are whole anyway, unless a flag asks for parts",
    ),
    Shortcut(
        name="group-query-attention",
        help="Grouped-query attention; --num-query-groups alone says the same.",
        rule=_needs_query_groups,
    ),
    Shortcut(
        name="no-pipeline-parallel",
        help="One pipeline stage; refused with --pipeline-model-parallel-size above 1.",
        rule=_needs_one_stage,
        note="--no-pipeline-parallel is known but has no effect here: one stage is no pipeline",
    ),
    Shortcut(
        name="enable-zbh1-pipeline",
        help="Same as --pipeline-schedule zb-h1.",
        sets={"parallel.pipeline_schedule": "zb-h1"},
    ),
    Shortcut(
        name="fp8-format",
        arity=VALUE,
        help="Megatron-LM's flag: hybrid is the same as --fp8 tensorwise, e4m3 as --fp8 rowwise.",
        sets={"precision.fp8": ARGUMENT},
        choices=_RECIPES,
    ),
    *(
        Shortcut(name=f"fp8-{format}", help=f"Same as --fp8 {recipe}.", sets={"precision.fp8": recipe})
        for format, recipe in _RECIPES.items()
    ),
    old_name("model-parallel-size", "parallel.tensor_model_parallel_size"),
    old_name("warmup", "optimizer.lr_warmup_fraction"),
    old_name("embedding-dim", "model.hidden_size", system="AQ-SGD"),
    old_name("num-heads", "model.num_attention_heads", system="AQ-SGD"),
    old_name("warmup-steps", "optimizer.lr_warmup_iters", system="AQ-SGD"),
    old_name("pp-mode", "parallel.pipeline_schedule", system="AQ-SGD"),
)

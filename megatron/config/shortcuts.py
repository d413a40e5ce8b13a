"""Flags that stand for other flags: old names, and switches that set a field to a certain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import UserError


class Explicit(dict[str, Any]):
    """Values that were given explicitly: dotted field -> value.

    levels: dotted field -> number of the source that gave it; a higher one wins over a lower one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.levels: dict[str, int] = {}

    def add(self, values: Mapping[str, Any], level: int) -> None:
        """Take what a source says; sources come in ascending order."""
        self.update(values)
        self.levels.update(dict.fromkeys(values, level))


@dataclass(frozen=True, kw_only=True)
class Shortcut:
    """A flag without a field of its own. Names are without dashes.

    sets: dotted field -> value. The value VALUE means the word given to the flag.
    when: runs after everything was read, when the flag was given, on the values that were given explicitly
        (dotted field -> value); it may add to them or raise UserError.
    note: a line to report when the flag is given; {value} is the word given.
    """

    name: str
    help: str
    sets: Mapping[str, str]
    takes_value: bool = False
    when: Callable[[Explicit], None] | None = None
    note: str = ""


VALUE = "\0value"

_POSITION = "model.position_embedding_type"
_SCALING = "model.rotary_scaling"


def _without_position_embedding(explicit: Explicit) -> None:
    given = explicit.setdefault(_POSITION, "none")
    if given == "learned_absolute":
        raise UserError("--no-position-embedding contradicts --position-embedding-type learned_absolute; give only one")


def _needs_query_groups(explicit: Explicit) -> None:
    if explicit.get("model.num_query_groups") is None:
        raise UserError("--group-query-attention needs the number of groups; add --num-query-groups N")


def _needs_one_stage(explicit: Explicit) -> None:
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
        help="Same as --recompute-granularity full --recompute-method METHOD.",
        sets={"recompute.recompute_granularity": "full", "recompute.recompute_method": VALUE},
        takes_value=True,
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
        help="Same as --rotary-scaling linear --rotary-scaling-factor FACTOR.",
        sets={_SCALING: "linear", "model.rotary_scaling_factor": VALUE},
        takes_value=True,
    ),
    Shortcut(
        name="no-position-embedding",
        help="No learned positions: --position-embedding-type none, unless rope is asked for.",
        sets={},
        when=_without_position_embedding,
    ),
    Shortcut(
        name="group-query-attention",
        help="Grouped-query attention; --num-query-groups alone says the same.",
        sets={},
        when=_needs_query_groups,
    ),
    Shortcut(
        name="no-pipeline-parallel",
        help="One pipeline stage; refused with --pipeline-model-parallel-size above 1.",
        sets={},
        when=_needs_one_stage,
        note="--no-pipeline-parallel is known but has no effect here: one stage is no pipeline",
    ),
    Shortcut(
        name="model-parallel-size",
        help="Old name of --tensor-model-parallel-size.",
        sets={"parallel.tensor_model_parallel_size": VALUE},
        takes_value=True,
        note="--model-parallel-size is an old name: taken as --tensor-model-parallel-size {value}",
    ),
    Shortcut(
        name="warmup",
        help="Old name of --lr-warmup-fraction.",
        sets={"optimizer.lr_warmup_fraction": VALUE},
        takes_value=True,
        note="--warmup is an old name: taken as --lr-warmup-fraction {value}",
    ),
    Shortcut(
        name="embedding-dim",
        help="AQ-SGD's name of --hidden-size.",
        sets={"model.hidden_size": VALUE},
        takes_value=True,
    ),
    Shortcut(
        name="num-heads",
        help="AQ-SGD's name of --num-attention-heads.",
        sets={"model.num_attention_heads": VALUE},
        takes_value=True,
    ),
    Shortcut(
        name="warmup-steps",
        help="AQ-SGD's name of --lr-warmup-iters.",
        sets={"optimizer.lr_warmup_iters": VALUE},
        takes_value=True,
    ),
    Shortcut(
        name="pp-mode",
        help="AQ-SGD's name of --pipeline-schedule.",
        sets={"parallel.pipeline_schedule": VALUE},
        takes_value=True,
    ),
)

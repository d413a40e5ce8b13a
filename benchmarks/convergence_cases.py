"""The cases of the convergence benchmark: their compressors, layouts and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point

CB = "pp-backward=lowrank,rank=16"
MEAN = f"{CB},when=epilogue,error-feedback=lazy-mean"
RADIUS = "dp-grad=stable-topk,interval=5,flush=rotate,warmup=200"
SC = "dp-grad=powersgd,rank=16,stages=first:1,warmup=40"
MINMAX = "grid=minmax,scale-dtype=bf16"
POWERSGD = "dp-grad=powersgd,rank=16,warmup=40"
SHARDED = "--use-distributed-optimizer"
"""Flag of the cases that gather parameters."""

CASES: dict[str, list[str]] = {
    "dense": [],
    "CB, LEP": [f"{CB},when=epilogue,error-feedback=lazy"],
    "CB, LEP of means": [MEAN],
    "CB, no LEP": [f"{CB},when=epilogue,error-feedback=off"],
    "CB of all, rank 4, LEP": ["pp-backward=lowrank,rank=4,error-feedback=lazy"],
    "CB of all, rank 4, LEP of means": ["pp-backward=lowrank,rank=4,error-feedback=lazy-mean"],
    "CB of all, rank 4, no LEP": ["pp-backward=lowrank,rank=4,error-feedback=off"],
    "CB+FE": [MEAN, "embedding=fused"],
    "CB+FE+SC": [MEAN, "embedding=fused", SC],
    "PowerSGD": [POWERSGD],
    "PowerSGD, factors of 8 bits": [f"{POWERSGD},factors=fixpoint8"],
    "PowerSGD, factors of 4 bits": [f"{POWERSGD},factors=fixpoint4"],
    "Radius d=0.5": [f"{RADIUS},density=0.5"],
    "Radius d=0.1": [f"{RADIUS},density=0.1"],
    "Radius d=0.01": [f"{RADIUS},density=0.01"],
    "delta fw4/bw8": ["pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8"],
    "delta fw2/bw4": ["pp-forward=delta,bits=2", "pp-backward=fixpoint,bits=4"],
    "delta by token fw4/bw8": ["pp-forward=delta,predict=token,bits=4", "pp-backward=fixpoint,bits=8"],
    "delta by token fw2/bw8": ["pp-forward=delta,predict=token,bits=2", "pp-backward=fixpoint,bits=8"],
    "fixpoint fw4/bw8": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8"],
    "fixpoint fw2/bw4": ["pp-forward=fixpoint,bits=2", "pp-backward=fixpoint,bits=4"],
    "fixpoint fw4/bw6": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=6"],
    "fixpoint minmax fw4/bw6": [f"pp-forward=fixpoint,bits=4,{MINMAX}", "pp-backward=fixpoint,bits=6"],
    "fixpoint minmax, rotated, fw4/bw6": [
        f"pp-forward=fixpoint,bits=4,{MINMAX},rotation=64",
        "pp-backward=fixpoint,bits=6",
    ],
    "fixpoint minmax, outliers rotated, fw4/bw6": [
        f"pp-forward=fixpoint,bits=4,{MINMAX},rotation=64,rotate-when=outlier",
        "pp-backward=fixpoint,bits=6",
    ],
    "fixpoint minmax, rotated, fw3.8/bw6": [
        f"pp-forward=fixpoint,bits=3.8,{MINMAX},rotation=64",
        "pp-backward=fixpoint,bits=6",
    ],
    "fixpoint midrise fw2/bw4": ["pp-forward=fixpoint,bits=2,grid=midrise", "pp-backward=fixpoint,bits=4"],
    "fixpoint fw8/bw8": ["pp-forward=fixpoint,bits=8", "pp-backward=fixpoint,bits=8"],
    "float8 fw e4m3/bw e5m2": ["pp-forward=float8", "pp-backward=float8,format=e5m2"],
    "float8 gradients": ["dp-grad=float8"],
    "parameters fixpoint 4, group 2048": ["param-gather=fixpoint,bits=4,group=2048", SHARDED],
    "parameters float8": ["param-gather=float8", SHARDED],
    "CB+FE, delta fw4, Radius d=0.1": [MEAN, "embedding=fused", "pp-forward=delta,bits=4", f"{RADIUS},density=0.1"],
}

_EIGHT, _FOUR = "fixpoint,bits=8,group=64", "fixpoint,bits=4,group=64,rotation=64"
EXPERTS = "experts"
"""First word of the cases of a model with experts."""
CASES |= {
    f"{EXPERTS}, dense": [],
    f"{EXPERTS}, dispatch forward 8": [f"ep-dispatch-forward={_EIGHT}"],
    f"{EXPERTS}, combine backward 8": [f"ep-combine-backward={_EIGHT}"],
    f"{EXPERTS}, combine forward 8": [f"ep-combine-forward={_EIGHT}"],
    f"{EXPERTS}, dispatch backward 8": [f"ep-dispatch-backward={_EIGHT}"],
    f"{EXPERTS}, to the experts 8": [f"ep-dispatch-forward={_EIGHT}", f"ep-combine-backward={_EIGHT}"],
    f"{EXPERTS}, all 8": [f"ep-dispatch={_EIGHT}", f"ep-combine={_EIGHT}"],
    f"{EXPERTS}, to the experts 4, else 8": [
        f"ep-dispatch-forward={_FOUR}",
        f"ep-combine-backward={_FOUR}",
        f"ep-combine-forward={_EIGHT}",
        f"ep-dispatch-backward={_EIGHT}",
    ],
    f"{EXPERTS}, all 4": [f"ep-dispatch={_FOUR}", f"ep-combine={_FOUR}"],
}

REPLICAS = "replicas"
"""First word of the cases of 4 replicas on 2 nodes."""
CASES |= {
    f"{REPLICAS}, dense": [],
    f"{REPLICAS}, fixpoint 4": ["dp-grad=fixpoint,bits=4,error-feedback=on"],
    f"{REPLICAS}, levels 8/4": ["dp-grad=fixpoint,levels=8/4,error-feedback=on"],
    f"{REPLICAS}, levels 8/4, no error feedback": ["dp-grad=fixpoint,levels=8/4,error-feedback=off"],
}

TENSORS = "tensors"
"""First word of the cases of 2 tensor-parallel ranks."""
CASES |= {f"{TENSORS}, dense": []}

EXPERT_PAIR = "expert pair"
"""First word of the cases of 2 replicas that share the experts of each layer."""
CASES |= {f"{EXPERT_PAIR}, dense": []}

ISLANDS = "islands"
"""First word of the cases of 4 islands of a process each."""
_MUON = "--optimizer=muon"
_STREAMS = {5: "fragments=1", 20: "fragments=4", 50: "fragments=2"}
"""Fragments by the steps of a round: at most the number of layers, at equal distances."""
CASES |= {f"{REPLICAS}, Muon": [_MUON]}
for _h, _fragments in _STREAMS.items():
    CASES |= {
        f"{ISLANDS}, DiLoCo, H={_h}": [f"outer=identity,outer-preset=diloco,every={_h}"],
        f"{ISLANDS}, streaming, H={_h}": [f"outer=fixpoint,bits=4,outer-preset=streaming,every={_h},{_fragments}"],
        f"{ISLANDS}, SparseLoCo, H={_h}": [f"outer=chunked-topk,outer-preset=sparseloco,every={_h}"],
        f"{ISLANDS}, MuLoCo, H={_h}": [f"outer=fixpoint,bits=4,outer-preset=muloco,every={_h}", _MUON],
    }
_EXACT, _STREAMED = (CASES[f"{ISLANDS}, {name}, H=20"][0] for name in ("DiLoCo", "streaming"))
CASES |= {
    f"{ISLANDS}, DiLoCo, H=20, 10% in step": [f"{_EXACT},warmup=0.1"],
    f"{ISLANDS}, streaming, H=20, 10% in step": [f"{_STREAMED},warmup=0.1"],
    f"{ISLANDS}, streaming, H=20, compressed in step": [f"{_STREAMED},in-step=compressed"],
    f"{ISLANDS}, streaming, H=20, 10% in step, compressed": [f"{_STREAMED},warmup=0.1,in-step=compressed"],
}


def ladder_cases(points: str = "", hidden_size: int = 64) -> dict[str, list[str]]:
    """The candidates of ``--compress auto`` at the points whose names begin with ``points``, each by itself, named by
    their specs for a hidden size, behind the layout's first word. Without the fused embedding, whose losses are those
    of the plain one.
    """
    return {
        f"{_layout_of(point)}{spec}": [spec, *([SHARDED] if point is Point.PARAM_GATHER else [])]
        for name, registration in BUILTIN.items()
        for point, rungs in registration.ladder.items()
        for spec in (rung.spec(point, name, hidden_size) for rung in rungs)
        if point is not Point.EMBED_GRAD and spec.startswith(points)
    }


def _layout_of(point: Point) -> str:
    """First word of the cases with the layout of a candidate, and a comma; empty for two stages."""
    if point in (Point.TP_FWD, Point.TP_BWD):
        return f"{TENSORS}, "
    if point.is_expert_point:
        return f"{EXPERT_PAIR}, "
    return f"{REPLICAS}, " if point is Point.DP_GRAD else ""


MARGIN = 0.3
"""Percent of loss within which a case or a spec counts as equivalent to dense, by two one-sided tests at 5%."""

SMALL_RUN: dict[str, Any] = {
    "num-attention-heads": 4,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "position-embedding-type": "rope",
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "global-batch-size": 16,
    "lr-decay-style": "cosine",
    "weight-decay": 0.1,
    "num-workers": 0,
    "log-interval": 20,
    "eval-iters": 100,
    "distributed-backend": "gloo",
}
"""Flags of all small models whose losses are compared."""

MODEL: dict[str, Any] = {
    **SMALL_RUN,
    "num-layers": 4,
    "hidden-size": 64,
    "pipeline-model-parallel-size": 2,
    "micro-batch-size": 2,
    "sample-order": "fixed",
    "lr": 3e-3,
    "min-lr": 3e-4,
    "adam-beta2": 0.999,
}

WITH_EXPERTS: dict[str, Any] = {
    "num-experts": 8,
    "moe-ffn-hidden-size": 128,
    "moe-aux-loss-coeff": 0.01,
    "expert-model-parallel-size": 4,
}


@dataclass(frozen=True)
class Family:
    """Layout and baseline of the cases with the same first word.

    Args:
        baseline: name of their baseline.
        flags: flags in addition to MODEL.
        ranks: number of processes.
        nodes: simulated nodes.
        islands: islands among the ranks.
        evaluations: validations during the run.
    """

    baseline: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 4
    nodes: int = 1
    islands: int = 1
    evaluations: int = 2


_REPLICATED: dict[str, Any] = {"pipeline-model-parallel-size": 1, "micro-batch-size": 4}
_SPLIT: dict[str, Any] = {
    "pipeline-model-parallel-size": 1,
    "tensor-model-parallel-size": 2,
    "micro-batch-size": 16,
}
_PAIR: dict[str, Any] = {
    **WITH_EXPERTS,
    "pipeline-model-parallel-size": 1,
    "expert-model-parallel-size": 2,
    "micro-batch-size": 8,
}
FAMILIES: dict[str, Family] = {
    TENSORS: Family(f"{TENSORS}, dense", _SPLIT, ranks=2),
    EXPERT_PAIR: Family(f"{EXPERT_PAIR}, dense", _PAIR, ranks=2),
    EXPERTS: Family(f"{EXPERTS}, dense", {**WITH_EXPERTS, **_REPLICATED}),
    REPLICAS: Family(f"{REPLICAS}, dense", _REPLICATED, nodes=2),
    ISLANDS: Family(f"{REPLICAS}, dense", _REPLICATED, islands=4),
}
STAGES = Family("dense", evaluations=8)
"""All other cases, with two pipeline stages."""


def family(case: str) -> Family:
    """The family of a case, by its first word."""
    return FAMILIES.get(case.partition(",")[0], STAGES)


def is_flag(word: str) -> bool:
    """Whether a word of a case is a flag of the run, rather than a spec of a compressor."""
    return word.startswith("--")


def read_case(text: str) -> tuple[str, list[str]]:
    """Parses a user's case, ``NAME: SPEC ... --flag=value ...``.

    Raises:
        ValueError: when it has no name.
    """
    name, colon, words = text.partition(":")
    if not colon or not name.strip():
        raise ValueError(f"{text!r}: write NAME: SPEC ... --flag=value ...")
    return name.strip(), words.split()

"""Specs, layouts and sizes of a card's runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.convergence_cases import MODEL
from megatron.base.errors import UserError
from megatron.compression.api import RoundCompressor
from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, read_specs

STAGES, REPLICAS, TENSORS = "stages", "replicas", "tensor-parallel ranks"
_NEEDS: Mapping[Point, tuple[str, ...]] = {
    Point.PP_FWD: (STAGES,),
    Point.PP_BWD: (STAGES,),
    Point.DP_GRAD: (REPLICAS,),
    Point.PARAM_GATHER: (REPLICAS,),
    Point.EMBED_GRAD: (STAGES, REPLICAS),
    Point.TP_FWD: (TENSORS,),
    Point.TP_BWD: (TENSORS,),
}
"""Kinds of ranks, two of each, that give a point traffic; other points have none in the toy runs."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks of a card's runs, dense and compressed: the fewest that give all points of the specs traffic.

    Args:
        tp, pp, dp: tensor-parallel ranks, pipeline stages and replicas.
        nodes: simulated nodes.
        flags: further flags of all runs.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """Readable name of the layout."""
        counts = ((self.pp, STAGES), (self.dp, REPLICAS), (self.tp, TENSORS))
        words = [f"{count} {name}" for count, name in counts if count > 1]
        words += [f"{self.nodes} nodes"] if self.nodes > 1 else []
        return " x ".join(words) + "".join(f", --{flag}" for flag in self.flags)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the flags."""
        sizes = {"tensor-model-parallel-size": self.tp, "pipeline-model-parallel-size": self.pp}
        return {**sizes, **self.flags}


def read_card_specs(text: str, iterations: int) -> dict[Point, Spec]:
    """Parse the specs of a card, separated by spaces.

    Raises:
        UserError: for an unknown spec, or one at a point that the toy runs do not have.
    """
    if not text.split():
        raise UserError("--spec is empty; write POINT=NAME[,key=value...], such as dp-grad=powersgd,rank=4")
    try:
        specs = read_specs(text.split(), Registry(BUILTIN), RunLength(iterations))
    except UserError as error:
        raise UserError(str(error).replace("--compress", "--spec")) from error
    for point in specs:
        if point not in _NEEDS:
            points = ", ".join(known.value for known in _NEEDS)
            raise UserError(f"--spec {text}: the toy runs have no traffic at {point.value}; their points are {points}")
    return specs


def layout_of(specs: Mapping[Point, Spec]) -> RankLayout:
    """Return the layout of a card with these specs."""
    needs = {need for point in specs for need in _NEEDS[point]}
    tp, pp, dp = (1 + (need in needs) for need in (TENSORS, STAGES, REPLICAS))
    flags = {"use-distributed-optimizer": True} if Point.PARAM_GATHER in specs else {}
    compressors = [spec.make_compressor() for spec in specs.values()]
    if any(isinstance(each, RoundCompressor) and each.traits.levels for each in compressors):
        return RankLayout(tp, pp, 4, nodes=2, flags=flags)
    return RankLayout(tp, pp, dp, flags=flags)


@dataclass(frozen=True)
class Size:
    """A size of the text's runs.

    Args:
        width: hidden size.
        iterations: iterations of training.
    """

    width: int
    iterations: int


@dataclass(frozen=True)
class Form:
    """Extent of the training for a card.

    Args:
        name: name of the form.
        seeds: paired seeds of the main size.
        main: size of the paired runs, one of the law's.
        sizes: sizes that the law of the gap is fitted to.
        heldout: size that the law predicts.
        law_seeds: seeds of the law's other sizes, and of the held-out size.
        train_bytes: bytes of the training text.
        places: held-out tokens on which two models are compared.
        canary_seeds, canary_iterations: seeds and iterations of the canaries' runs.
        canary_documents: canaries to train on.
        prompts: held-out prompts of each canary.
        link_iterations: iterations of a run on the link.
        layers: layers of the text's models.
        evaluations: batches of a validation.
    """

    name: str
    seeds: int
    main: Size
    sizes: tuple[Size, ...]
    heldout: Size
    law_seeds: int
    train_bytes: int
    places: int = 2048
    canary_seeds: int = 3
    canary_iterations: int = 2000
    canary_documents: int = 40_000
    prompts: int = 200
    link_iterations: int = 30
    layers: int = 4
    evaluations: int = 40


def _grid(widths: tuple[int, ...], budgets: tuple[int, ...]) -> tuple[Size, ...]:
    return tuple(Size(width, iterations) for width in widths for iterations in budgets)


FULL = Form("full", 5, Size(64, 1200), _grid((32, 64, 128), (300, 1200)), Size(192, 1200), 2, 600_000)
SHORT = Form(
    "short",
    5,
    Size(64, 400),
    _grid((32, 48, 64), (150, 400)),
    Size(96, 400),
    1,
    300_000,
    canary_seeds=1,
    canary_iterations=1600,
)

TEXT_MODEL: dict[str, Any] = {name: MODEL[name] for name in MODEL if name != "pipeline-model-parallel-size"} | {
    "log-interval": 10,
}
"""Flags of the text's runs: those of bench-convergence."""
CANARY_MODEL: dict[str, Any] = {
    **TEXT_MODEL,
    "num-layers": 2,
    "hidden-size": 96,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "position-embedding-type": "learned_absolute",
    "make-vocab-size-divisible-by": 8,
    "init-method-std": 0.1,
    "global-batch-size": 128,
    "lr": 4e-3,
    "min-lr": 1e-4,
    "adam-beta2": 0.98,
}
"""Flags of the canaries' runs: a dense model learns four of them exactly in 1,600 iterations, and mostly recall."""


def heads_of(width: int) -> int:
    """Attention heads of a width; an even number, which two tensor-parallel ranks divide."""
    return max(width // 32 * 2, 2)


def micro_batch_of(layout: RankLayout, batch: int) -> int:
    """Samples of a micro-batch: a replica's share, which stages split into four."""
    return max(batch // layout.dp // (4 if layout.pp > 1 else 1), 1)

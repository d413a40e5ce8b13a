"""Compressors in T5: nearly exact compressors keep its losses, at every point of its pipeline and on every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron.training.assembly import Engines
from megatron.training.replica_check import disagreements
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import T5, Trace, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

STEPS = 6
WITHIN = {"nearly": (4e-3, 1.4e-2), "forward": (4e-3, 1.4e-2), "backward": (1e-3, 3e-3), "embedding": (1e-3, 3e-3)}
"""Of losses, and of gradient norms relative to them: twice the measured ones. Rank 2 changes both ten times as much."""
PIPELINE = {"pipeline_model_parallel_size": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {**PIPELINE, "tensor_model_parallel_size": 2},
    "sp2": {**PIPELINE, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp1": PIPELINE,
}
# Rank equal to the columns of a matrix, smaller than the matrix in half precision, and 8 bits of a difference.
FORWARD, BACKWARD, EMBEDDING = NEARLY_EXACT = (
    "pp-forward=delta,predict=token,bits=8",
    "pp-backward=lowrank,rank=32,factors=bf16,error-feedback=lazy",
    "embedding=powersgd,rank=32,factors=bf16",
)
COARSE = (
    "pp-forward=delta,predict=token",
    "pp-backward=lowrank,rank=2,error-feedback=lazy",
    "embedding=powersgd,rank=2",
)
SPECS: dict[str, Sequence[str]] = {
    "exact": (), "nearly": NEARLY_EXACT, "coarse": COARSE,
    "forward": (FORWARD,), "backward": (BACKWARD,), "embedding": (EMBEDDING,),
}  # fmt: skip
POINTS = ("pp-forward", "pp-backward", "embedding")
Traced = Mapping[str, tuple[Trace, list[str]]]


def _traced(runs: Mapping[str, Mapping[str, Mapping[str, Any]]], steps: int = STEPS) -> Traced:
    meshes: dict[object, Any] = {}
    traces = {}
    for name, changes in runs.items():
        differences: list[str] = []

        def look(after: Engines, differences: list[str] = differences) -> None:
            differences.extend(disagreements(after))

        traces[name] = (tiny_train(tiny_engines(changes, meshes), steps, after_step=look), differences)
    return traces


def _run(layout: Mapping[str, Any], specs: Sequence[str], **sections: Any) -> dict[str, Mapping[str, Any]]:
    return {**T5, "parallel": layout, "compression": {"compress": list(specs)}, **sections}


def _sent(ranks: Sequence[Traced], name: str, point: str) -> tuple[float, float]:
    """Bytes of all ranks, with and without compression."""
    traces = [traces[name][0] for traces in ranks]
    return tuple(sum(getattr(t, kind).get(point, 0) for t in traces) for kind in ("bytes_by_point", "raw_by_point"))


# Tensor-parallel ranks each send a whole activation, or their part of its sequence, by the same codecs.
@pytest.mark.parametrize("layout", mark_repeats(LAYOUTS, keep=["tp1"]))
def test_nearly_exact_compression_changes_no_loss(layout: str) -> None:
    """Between stages of the encoder, to the decoder, between stages of it, and of three holders of the embedding."""
    runs = {name: _run(LAYOUTS[layout], specs) for name, specs in SPECS.items()}
    ranks = run_ranks(3 if layout == "tp1" else 6, _traced, runs, timeout=240)
    exact = ranks[0]["exact"][0]
    for name, (trace, differences) in ranks[0].items():
        assert differences == [], name
        loss, norm = WITHIN.get(name, (0.0, 0.0))
        if name == "coarse":
            assert trace.losses != pytest.approx(exact.losses, abs=4e-2)
        else:
            assert trace.losses == pytest.approx(exact.losses, abs=loss, rel=0), name
            assert trace.grad_norms == pytest.approx(exact.grad_norms, rel=norm, abs=0), name
    for point in POINTS:
        for name, specs in SPECS.items():
            sent, raw = _sent(ranks, name, point)
            assert raw > 0, (name, point)
            assert (sent < 0.95 * raw) == any(spec.startswith(point) for spec in specs), (name, point, sent, raw)


LAZY = "pp-backward=lowrank,rank=2,error-feedback=lazy"


def test_the_encoder_gets_its_own_gradient_with_a_basis_of_channels() -> None:
    """Between stages of the decoder the encoder's part of a message is a hundredth of the decoder's. With a basis of
    tokens its residual is made of the decoder's, and its gradient several times as large as it should be."""
    specs: dict[str, Sequence[str]] = {"exact": (), "tokens": (LAZY,), "channels": (f"{LAZY},basis=channels",)}
    batch = {"training": {"global_batch_size": 16}}
    runs = {name: _run(PIPELINE, compress, **batch) for name, compress in specs.items()}
    norms = {name: trace.grad_norms[0] for name, (trace, _) in run_ranks(3, _traced, runs, 1)[0].items()}
    assert norms["channels"] == pytest.approx(norms["exact"], rel=0.2)
    assert norms["tokens"] > 2 * norms["exact"]


FULL = ("dp-grad=powersgd,rank=32,min-ratio=0", "embedding=powersgd,rank=32,min-ratio=0")
REPLICATED: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "exact": ({}, ()),
    "no pipeline": ({}, FULL[:1]),
    "pipeline": (PIPELINE, FULL[:1]),
    "both": (PIPELINE, FULL),
    "fused": (PIPELINE, (FULL[0], "embedding=fused")),
    "coarse": (PIPELINE, ("dp-grad=powersgd,rank=2", "embedding=powersgd,rank=2")),
    "coarse, fused": (PIPELINE, ("dp-grad=powersgd,rank=2", "embedding=fused")),
}


def test_powersgd_with_three_stages_that_hold_the_embedding() -> None:
    """With as many columns as a matrix has PowerSGD is exact, so the losses are those of any other layout."""
    fp64 = {"precision": {"fp64": True}}
    runs = {name: _run(layout, specs, **fp64) for name, (layout, specs) in REPLICATED.items()}
    alone = {name: run for name, run in runs.items() if not REPLICATED[name][0]}
    split = {name: run for name, run in runs.items() if name not in alone}
    ranks = run_ranks(6, _traced, split, timeout=240)
    traces = {**run_ranks(2, _traced, alone, timeout=120)[0], **ranks[0]}
    for name, (trace, differences) in traces.items():
        assert differences == [], name
        if name.startswith("coarse"):
            assert trace.losses != pytest.approx(traces["exact"][0].losses, abs=4e-3)
            sent, raw = _sent(ranks, name, "dp-grad")
            assert sent < 0.5 * raw
        else:
            assert trace.losses == pytest.approx(traces["exact"][0].losses, rel=1e-9), name
            assert trace.grad_norms == pytest.approx(traces["exact"][0].grad_norms, rel=1e-7), name

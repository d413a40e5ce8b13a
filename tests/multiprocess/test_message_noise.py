"""Stochastic rounding by compressors without state."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron.compression.fixpoint import Quantizer
from tests.multiprocess.test_experts import CODED, FOLDED, MOE, SP, UNIFORM, Changes, _parallel
from tests.multiprocess.test_layouts import OF_DEBERTA, OF_T5, VIRTUAL
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_run

pytestmark = pytest.mark.multiprocess


def _noisy(*points: str) -> Changes:
    return {"compression": {"compress": [f"{point}=fixpoint,bits=6,rounding=stochastic" for point in points]}}


TENSOR = _noisy("tp-forward", "tp-backward")
SINGLE: Changes = {"precision": {"fp64": False}, "training": {"global_batch_size": 2}}
EXPERTS = merge(
    MOE,
    CODED,
    {"model": {"num_layers": 2, "num_experts": [4]}},
    _noisy("tp-forward", "tp-backward", "ep-dispatch", "ep-combine"),
)
DEBERTA = merge(OF_DEBERTA, SINGLE, {"model": {"num_layers": 2}}, TENSOR)
T5 = merge(OF_T5, SINGLE, {"model": {"num_layers": 1, "decoder_num_layers": 2}}, TENSOR)
RUNS: dict[str, tuple[int, Changes]] = {
    "deberta": (2, merge(DEBERTA, _parallel(tp=2))),
    "deberta sp": (2, merge(DEBERTA, _parallel(tp=2, **SP))),
    "t5": (2, merge(T5, _parallel(tp=2))),
    "t5 sp": (2, merge(T5, _parallel(tp=2, **SP))),
    "experts": (4, merge(EXPERTS, _parallel(tp=2, ep=2))),
    "experts sp": (4, merge(EXPERTS, _parallel(tp=2, ep=2, **SP))),
    "experts of tensor-parallel ranks": (4, merge(EXPERTS, _parallel(tp=2, ep=2, **FOLDED))),
    "messages in parts": (4, merge(TENSOR, _parallel(tp=2, pp=2, scatter_gather_tensors_in_pipeline=True, **VIRTUAL))),
}
KEPT = ("deberta", "t5 sp", "experts sp", "messages in parts")
"""Each model and each kind of message; sequence-parallel ranks send more kinds."""


def _run_all(runs: dict[str, Changes]) -> dict[str, tuple[list[float], list[int]]]:
    """Each run's losses, and the seeds of its messages' noise."""
    seeds_by_run, encode = {}, Quantizer.encode
    for name, changes in runs.items():
        seeds: list[int] = []

        def noting(form: Quantizer, x: Any, seed: int, *args: Any, drawn: list[int] = seeds, **kw: Any) -> Any:
            drawn.append(seed)
            return encode(form, x, seed, *args, **kw)

        with mock.patch.object(Quantizer, "encode", noting):
            seeds_by_run[name] = (tiny_run(changes, 2).losses, seeds)
    return seeds_by_run


@pytest.mark.parametrize("name", mark_repeats(RUNS, KEPT))
def test_each_message_draws_its_own_noise_and_recomputation_repeats_it(name: str) -> None:
    """Each point, layer, micro-batch, receiver, iteration and part of a sum. Two micro-batches with the same noise
    would bring its error into their sum twice."""
    ranks, changes = RUNS[name]
    for seeds_by_run in run_ranks(ranks, _run_all, {"once": changes, "again": merge(changes, UNIFORM)}, timeout=120.0):
        losses, seeds = seeds_by_run["once"]
        repeated, seeds_again = seeds_by_run["again"]
        assert len(seeds) > 90
        assert len(set(seeds)) == len(seeds)
        assert repeated == losses
        assert len(seeds_again) > len(seeds)
        assert set(seeds_again) == set(seeds)

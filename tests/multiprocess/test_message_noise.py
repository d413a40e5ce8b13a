"""Stochastic rounding by compressors without state."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron.compression.fixpoint import Quantizer
from tests.multiprocess.test_experts import CODED, FOLDED, MOE, SP, UNIFORM, Changes, _parallel
from tests.multiprocess.test_layouts import OF_DEBERTA, OF_T5, VIRTUAL
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
RUNS: dict[int, dict[str, Changes]] = {
    2: {
        "deberta": merge(DEBERTA, _parallel(tp=2)),
        "deberta sp": merge(DEBERTA, _parallel(tp=2, **SP)),
        "t5": merge(T5, _parallel(tp=2)),
        "t5 sp": merge(T5, _parallel(tp=2, **SP)),
    },
    4: {
        "experts": merge(EXPERTS, _parallel(tp=2, ep=2)),
        "experts sp": merge(EXPERTS, _parallel(tp=2, ep=2, **SP)),
        "experts of tensor-parallel ranks": merge(EXPERTS, _parallel(tp=2, ep=2, **FOLDED)),
        "messages in parts": merge(TENSOR, _parallel(tp=2, pp=2, scatter_gather_tensors_in_pipeline=True, **VIRTUAL)),
    },
}


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


@pytest.mark.parametrize("ranks", RUNS)
def test_each_message_draws_its_own_noise_and_recomputation_repeats_it(ranks: int) -> None:
    """Each point, layer, micro-batch, receiver, iteration and part of a sum. Two micro-batches with the same noise
    would bring its error into their sum twice."""
    again = {f"{name} again": merge(changes, UNIFORM) for name, changes in RUNS[ranks].items()}
    for seeds_by_run in run_ranks(ranks, _run_all, RUNS[ranks] | again, timeout=120.0):
        for name in RUNS[ranks]:
            losses, seeds = seeds_by_run[name]
            repeated, seeds_again = seeds_by_run[f"{name} again"]
            assert len(seeds) > 90, name
            assert len(set(seeds)) == len(seeds), name
            assert repeated == losses, name
            assert len(seeds_again) > len(seeds), name
            assert set(seeds_again) == set(seeds), name

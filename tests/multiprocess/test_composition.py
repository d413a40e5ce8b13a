"""Points x compressors x layouts x precisions: every pair of settings that can go together runs a few steps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.distributed.topology import Topology
from megatron.training.replica_check import disagreements
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_config, tiny_engines, tiny_train

Case = dict[str, str]

FACTORS: dict[str, list[str]] = {
    "layout": ["tp2 dp2", "pp2 dp2", "tp2 pp2", "dp4", "pp4", "pp2 dp2 virtual", "pp2 dp2 gpipe", "pp2 dp2 zb-h1"],
    "precision": ["fp32", "bf16", "fp16"],
    "dp-grad": [
        "none",
        "powersgd,rank=2",
        "powersgd,rank=2,error-feedback=aggregate,stages=first:1",
        "powersgd,rank=2,factors=fixpoint8",
        "edgc,rank=6,min-rank=2,window=1,sample-every=1",
        "stable-topk,density=0.2,interval=2",
        "stable-topk,density=0.1,interval=2,range=2,flush=rotate,warmup=1",
        "topk,density=1~0.2@2",
        "chunked-topk,chunk=64,k=8,feedback-decay=0.95",
        "fixpoint,bits=8@0/3@2,error-feedback=on",
        "quantized-adam,bits=8,warmup=2",
    ],
    "pp-forward": [
        "none",
        "fixpoint,bits=5",
        "fixpoint,bits=4.5,group=16,grid=minmax,rotation=16,rotate-when=outlier",
        "delta,bits=3,cache=3",
        "delta-lowbits,first-bits=8",
        "lowrank,rank=12",
        "cast",
    ],
    "pp-backward": [
        "none",
        "lowrank,rank=3",
        "lowrank,rank=3,error-feedback=lazy",
        "lowrank,rank=3,factors=fixpoint4",
        "lowrank,rank=3,when=epilogue,error-feedback=lazy",
        "fixpoint,bits=6,rounding=stochastic",
        "cast",
    ],
    "embedding": [
        "none",
        "fused",
        "powersgd,rank=2",
        "powersgd,rank=2,factors=bf16,fused=on",
        "fixpoint,bits=8,error-feedback=on",
        "cast,error-feedback=on",
        "stable-topk,density=0.2,interval=2",
        "topk,density=0.2",
        "chunked-topk,chunk=64,k=8,bits=4",
    ],
    "tp": ["none", "fixpoint,bits=8", "powersgd,rank=14", "cast"],
    "param-gather": ["none", "fixpoint,bits=6", "cast"],
    "sharded": ["no", "yes"],
    "overlap": ["no", "yes"],
    "sequence": ["no", "yes"],
    "recompute": ["no", "full"],
}


def steps_of(case: Case) -> int:
    """Enough for a warm-up, a schedule, an interval and a second visit of each sample: all take a step or two here.
    fp16 skips its first step, and a warm-up of two is followed by two more."""
    return 4 if case["precision"] == "fp16" or "warmup=2" in case["dp-grad"] else 3


def changes_of(case: Case) -> dict[str, dict[str, Any]]:
    """The run that a case describes."""
    words = case["layout"].split()
    sizes = {word[:2]: int(word[2:]) for word in words if word[2:].isdigit()}
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "use_distributed_optimizer": case["sharded"] == "yes",
        "overlap_grad_reduce": case["overlap"] == "yes",
        "sequence_parallel": case["sequence"] == "yes",
    }
    if "virtual" in words:
        parallel["num_layers_per_virtual_pipeline_stage"] = 1
    if words[-1] in ("gpipe", "zb-h1"):
        parallel["pipeline_schedule"] = words[-1]
    if case["overlap"] == "yes":
        parallel["ddp_bucket_size"] = 3000
    points = ["dp-grad", "pp-forward", "pp-backward", "embedding", "param-gather"]
    specs = [f"{point}={case[point]}" for point in points if case[point] != "none"]
    specs += [f"{point}={case['tp']}" for point in ("tp-forward", "tp-backward") if case["tp"] != "none"]
    precision = {} if case["precision"] == "fp32" else {case["precision"]: True}
    # The first step of fp16 overflows and is skipped.
    scale = {"initial_loss_scale": 2.0**19, "hysteresis": 1} if case["precision"] == "fp16" else {}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform"} if case["recompute"] == "full" else {}
    chunks = parallel["pipeline_model_parallel_size"] * (2 if "virtual" in words else 1)
    return {
        "parallel": parallel,
        "precision": {**precision, **scale},
        "compression": {"compress": specs},
        "recompute": recompute,
        "data": {"sample_order": "fixed"},
        "model": {"num_layers": max(chunks, 2)},
        "training": {"global_batch_size": max(sizes.get("pp", 1), 2 * sizes.get("dp", 1))},
    }


def works(case: Case) -> bool:
    """Whether the settings may go together at all, and each says something."""
    layout = case["layout"]
    if "tp" not in layout and (case["tp"] != "none" or case["sequence"] == "yes"):
        return False
    if "pp" not in layout and any(case[p] != "none" for p in ("pp-forward", "pp-backward", "embedding")):
        return False
    if "dp" not in layout and any(case[p] != "none" for p in ("dp-grad", "param-gather")):
        return False
    if case["param-gather"] != "none" and case["sharded"] == "no":
        return False
    return _resolves(tuple(sorted(case.items())))


@cache
def _resolves(items: tuple[tuple[str, str], ...]) -> bool:
    """Whether the checks of the configuration accept a case."""
    try:
        tiny_config(changes_of(dict(items)), 4)
    except UserError:
        return False
    return True


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(case: Mapping[str, str]) -> Iterator[Pair]:
    yield from itertools.combinations(sorted(case.items()), 2)


def _plain(pair: Pair, source: random.Random) -> Case | None:
    """A case that holds a pair of settings, with no others that compress; None where it goes with nothing."""
    free = [name for name in ("layout", "sharded", "precision") if name not in dict(pair)]
    choices = list(itertools.product(*(FACTORS[name] for name in free)))
    for values in source.sample(choices, len(choices)):
        case = {name: first for name, (first, *_) in FACTORS.items()} | dict(zip(free, values, strict=True))
        if works(case | dict(pair)):
            return case | dict(pair)
    return None


def _enriched(case: Case, pair: Pair, missing: set[Pair], source: random.Random) -> Case:
    """The case with other settings, one after the other, as long as it then holds more of the missing pairs."""

    def gain(case: Case) -> int:
        return len(missing.intersection(pairs(case)))

    names = [name for name in FACTORS if name not in dict(pair)]
    for name in source.sample(names, len(names)) + source.sample(names, len(names)):
        variants = [case | {name: value} for value in FACTORS[name]]
        better = [other for other in sorted(variants, key=gain, reverse=True) if gain(other) > gain(case)]
        case = next(filter(works, better), case)
    return case


def cover(seed: int = 0) -> list[Case]:
    """Cases that hold every possible pair of settings, greedily, in an order in which neighbors have much in common."""
    source = random.Random(seed)
    missing: set[Pair] = set()
    for first, second in itertools.combinations(sorted(FACTORS), 2):
        missing |= {((first, a), (second, b)) for a in FACTORS[first] for b in FACTORS[second]}
    cases = []
    while missing:
        pair = min(missing)
        missing.discard(pair)
        if (plain := _plain(pair, source)) is not None:
            cases.append(_enriched(plain, pair, missing, source))
            missing.difference_update(pairs(cases[-1]))
    return sorted(cases, key=lambda case: sorted(dense_of(case).items()) + sorted(case.items()))


def with_precisions(cases: list[Case]) -> list[Case]:
    """Some of the cases that hold every pair of a precision and another setting, and so every setting."""
    missing = {pair for case in cases for pair in pairs(case) if "precision" in dict(pair)}
    chosen: list[Case] = []
    while missing:
        dense = [dense_of(case) for case in chosen]  # preferred: one more to compare with takes time
        gains = [(len(missing.intersection(pairs(case))), dense_of(case) in dense) for case in cases]
        chosen.append(cases[gains.index(max(gains))])
        missing.difference_update(pairs(chosen[-1]))
    return chosen


def dense_of(case: Case) -> Case:
    """The same run without compressors."""
    quiet = dict.fromkeys(("dp-grad", "pp-forward", "pp-backward", "embedding", "tp", "param-gather"), "none")
    return {**case, **quiet, "overlap": "no"}


Account = dict[str, tuple[float, float]]


def _run_all(cases: list[tuple[Case, int]]) -> list[tuple[list[float], list[str], Account]]:
    """Losses, disagreements at the end, and (raw, sent) bytes by point of this rank, for each case in turn."""
    results = []
    meshes: dict[object, Topology] = {}
    for case, steps in cases:
        engines = tiny_engines(changes_of(case), meshes)
        trace = tiny_train(engines, steps, epoch=2 * engines.config.training.global_batch_size)
        account = {p: (trace.raw_by_point[p], sent) for p, sent in trace.bytes_by_point.items()}
        results.append((trace.losses, disagreements(engines), account))
    return results


OTHER_PARTS = 4


@pytest.fixture(scope="module")
def parts() -> list[list[Case]]:
    """All cases: every setting in each precision, then the remaining pairs in several parts."""
    cases = cover()
    assert len(cases) > 150, "the checks refuse settings that may go together"
    chosen = with_precisions(cases)
    others = [case for case in cases if case not in chosen]
    ends = [len(others) * number // OTHER_PARTS for number in range(OTHER_PARTS + 1)]
    return [chosen, *(others[start:end] for start, end in itertools.pairwise(ends))]


@pytest.mark.parametrize("part", mark_repeats(range(1 + OTHER_PARTS), keep=[0]))
def test_every_pair_of_settings_trains_agrees_and_counts_bytes(parts: list[list[Case]], part: int) -> None:
    cases = parts[part]
    dense: list[Case] = []
    for case in cases:
        if dense_of(case) not in dense:
            dense.append(dense_of(case))
    runs = [(case, 1) for case in dense] + [(case, steps_of(case)) for case in cases]
    ranks = run_ranks(4, _run_all, runs, timeout=240)
    exact = {tuple(sorted(case.items())): [rank[i][2] for rank in ranks] for i, case in enumerate(dense)}
    for at, case in enumerate(cases, start=len(dense)):
        steps = steps_of(case)
        label = str({name: value for name, value in case.items() if value not in ("none", "no")})
        for number, rank in enumerate(ranks):
            losses, differences, account = rank[at]
            assert differences == [], f"{label}: {differences}"
            assert all(math.isfinite(loss) and 0 < loss < 7 for loss in losses), f"{label}: {losses}"
            assert losses == ranks[0][at][0], label
            before = exact[tuple(sorted(dense_of(case).items()))][number]
            fused = "fused" in case["embedding"]
            if fused and case["precision"] != "fp16":  # skipped steps sum nothing
                sums = [points.get(p, (0, 0)) for points in (account, before) for p in ("embedding", "dp-grad")]
                raw_sums, exact_sums = sums[0][0] + sums[1][0], sums[2][1] + sums[3][1]
                assert raw_sums == pytest.approx(steps * exact_sums, rel=1e-2), f"{label}: raw bytes of what is fused"
            for point, (raw, sent) in account.items():
                if point == "control" or (fused and point in ("embedding", "dp-grad")):
                    continue
                if point == "param-gather" and case["precision"] == "fp16":
                    continue  # skipped steps gather nothing
                times = steps
                if point == "embedding" and case["precision"] == "fp16":
                    times = min(round(raw / before[point][1]), steps)  # skipped steps need not exchange it
                assert raw == pytest.approx(times * before[point][1], rel=1e-2), f"{label}: raw bytes of {point}"
                plain = case["tp" if point.startswith("tp-") else point] == "none"
                assert not plain or sent == raw, f"{label}: {point}"

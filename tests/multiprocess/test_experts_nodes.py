"""Rows of tokens in two stages, on ranks of this machine that LOCAL_WORLD_SIZE groups into nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megatron.compression.points import EXPERT_POINTS
from megatron.models.experts import Experts
from megatron.parallel.expert.router import Routing
from tests.multiprocess.test_experts import CAPACITY, CODED, DIST, FOLDED, MOE, SP, UNIFORM, _parallel
from tests.support.cli import run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags, write_documents
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, merge, tiny_engines, tiny_run, tiny_train

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]

THREE: Changes = {"model": {"moe_router_topk": 3}}
LAYOUTS: dict[tuple[int, int], dict[str, tuple[Changes, Changes]]] = {
    # By number of ranks, and of those of a node: the layout, and the form of the experts.
    (4, 2): {
        "ep4": (_parallel(ep=4), {}),
        "ep4, capacity": (_parallel(ep=4), CAPACITY),
        "ep4 of tp2 dp2, sp": (_parallel(tp=2, ep=4, **FOLDED, **SP), THREE),
        "ep4, three experts a token, sharded, recomputed": ({**_parallel(ep=4, **DIST), **UNIFORM}, THREE),
    },
    (8, 2): {
        "ep4 pp2": (_parallel(pp=2, ep=4), CAPACITY),
        "ep4 tp2, a rank a node": (_parallel(tp=2, ep=4, moe_two_stage="on"), THREE),
    },
    (8, 4): {
        "ep4 tp2 sp sharded": (_parallel(tp=2, ep=4, **SP, **DIST), THREE),
    },
}


def _run_all(runs: dict[str, Changes], iterations: int) -> tuple[dict[str, Trace], int]:
    traces = {name: tiny_run(changes, iterations, masked=True) for name, changes in runs.items()}
    comm = tiny_engines(next(iter(runs.values()))).expert_comm
    return traces, 0 if comm.nodes is None else comm.nodes.size


CASES = [pytest.param(sizes, id="{} ranks, {} a node".format(*sizes)) for sizes in sorted(LAYOUTS)]


@pytest.mark.parametrize("ranks", mark_repeats(CASES, keep=["4 ranks, 2 a node", "8 ranks, 2 a node"]))
def test_layouts_agree(ranks: tuple[int, int]) -> None:
    """Losses and norms of gradients in fp64 are those of a single process."""
    runs = {name: merge(MOE, form, layout) for name, (layout, form) in LAYOUTS[ranks].items()}
    env = {"LOCAL_WORLD_SIZE": str(ranks[1])}
    traces, nodes = run_ranks(ranks[0], _run_all, runs, 2, timeout=300.0, env=env)[0]
    assert nodes == 2
    for name, (_, form) in LAYOUTS[ranks].items():
        reference, trace = tiny_run(merge(MOE, form), 2, masked=True), traces[name]
        assert trace.losses == pytest.approx(reference.losses, rel=1e-10, abs=0), name
        assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=1e-10, abs=0), name
        for losses, theirs in zip(trace.named, reference.named, strict=True):
            assert losses == pytest.approx(theirs, rel=1e-10), name


Chosen = list[list[int]]
"""The experts that take each token of a micro-batch, in a layer with so many experts."""


def _chosen(choices: list[tuple[int, Chosen]]) -> mock._patch[Any]:
    """Notes each layer's experts, and those of the tokens."""
    routed = Experts._apply_experts

    def noting(layer: Experts, x_sbh: Tensor, routing: Routing) -> Tensor:
        kept_tk = routing.experts_tk >= 0 if routing.kept_tk is None else routing.kept_tk
        pairs = zip(routing.experts_tk.tolist(), kept_tk.tolist(), strict=True)
        choices.append((layer.count, [[e for e, k in zip(*pair, strict=True) if k] for pair in pairs]))
        return routed(layer, x_sbh, routing)

    return mock.patch.object(Experts, "_apply_experts", noting)


def _accounts(runs: dict[str, Changes], steps: int) -> dict[str, tuple[dict[Any, Any], list[tuple[int, Chosen]]]]:
    """Bytes that each run has sent from this rank, by point, and its choices of experts."""
    results = {}
    for name, changes in runs.items():
        chosen: list[tuple[int, Chosen]] = []
        with _chosen(chosen):
            engines = tiny_engines(changes)
            accounts: Counter[tuple[str, str]] = Counter()

            def add(engines: Any, accounts: Counter[tuple[str, str]] = accounts) -> None:
                for point, account in engines.ledger.take_totals().items():
                    for kind in ("wire_bytes", "inside_bytes", "raw_bytes"):
                        accounts[point, kind] += account[kind]

            tiny_train(engines, steps, after_step=add)
        results[name] = (dict(accounts), chosen)
    return results


HIDDEN, NODES, PLACES = 64, 2, 2


def _rows(rank: int, by_rank: Sequence[Sequence[tuple[int, Chosen]]]) -> Iterator[tuple[str, int]]:
    """Rows, and choices, that a rank of two nodes of two sends by any way, counted token by token."""
    for source, layers in enumerate(by_rank):
        for count, tokens in layers:
            for experts in tokens:
                holders = [expert * len(by_rank) // count for expert in experts]
                for node in {holder // PLACES for holder in holders}:
                    carrier = node * PLACES + source % PLACES
                    if carrier != source:
                        yield from [("there", 1)] if rank == source else [("back", 1)] if rank == carrier else []
                    for holder in (holder for holder in holders if holder // PLACES == node):
                        if carrier != source:
                            yield from [("asked", 1)] if rank == source else [("given", 1)] if rank == carrier else []
                        if holder != carrier:
                            yield from [("out", 1)] if rank == carrier else [("home", 1)] if rank == holder else []


SPECS = {
    "exact": [],
    "8 bits": ["ep-dispatch=fixpoint,bits=8,group=64", "ep-combine=fixpoint,bits=8,group=64"],
    "4 bits to the experts": ["ep-dispatch-forward=fixpoint,bits=4,group=64"],
}
BYTES_OF_A_ROW = {
    "8 bits": dict.fromkeys((point.value for point in EXPERT_POINTS), HIDDEN + 4),
    "4 bits to the experts": {"ep-dispatch-forward": HIDDEN // 2 + 4},
}
STEPS = 3


def test_bytes_between_and_inside_nodes_are_rows_times_their_size() -> None:
    """Between nodes a row for each token and node, as coded; inside a row for each expert elsewhere, as it is; and of
    the choices a number and a weight there, a weight's gradient back."""
    forms = {name: {"compression": {"compress": specs}} for name, specs in SPECS.items()}
    forms["capacity"] = CAPACITY
    runs = {name: merge(MOE, CODED, THREE, _parallel(ep=4), form) for name, form in forms.items()}
    runs["one stage"] = merge(runs["exact"], {"parallel": {"moe_two_stage": "off"}})
    results = run_ranks(4, _accounts, runs, STEPS, env={"LOCAL_WORLD_SIZE": "2"})
    for name in forms:
        by_rank = [chosen for _, chosen in (result[name] for result in results)]
        for rank, result in enumerate(results):
            sent, rows = result[name][0], Counter(dict.fromkeys(("there", "back", "out", "home"), 0))
            for way, count in _rows(rank, by_rank):
                rows[way] += count
            assert min(rows.values()) > 50
            assert rows["asked"] > rows["there"] * 1.1  # or nothing was sent once for several experts
            ways = {
                "ep-dispatch-forward": ("there", "out"),
                "ep-dispatch-backward": ("back", "home"),
                "ep-combine-forward": ("back", "home"),
                "ep-combine-backward": ("there", "out"),
            }
            for point, (across, inside) in ways.items():
                wire = BYTES_OF_A_ROW.get(name, {}).get(point, HIDDEN * 4)
                assert sent[point, "inside_bytes"] == rows[inside] * HIDDEN * 4, (name, point)
                assert sent[point, "wire_bytes"] - sent[point, "inside_bytes"] == rows[across] * wire, (name, point)
                assert sent[point, "raw_bytes"] == (rows[across] + rows[inside]) * HIDDEN * 4, (name, point)
            layers = [count // len(results) for count, _ in by_rank[rank]]
            inside = sum(4 * (PLACES - 1) * local for local in layers)
            assert sent["control", "inside_bytes"] == inside
            # Beside messages of all runs: with one stage only counts, with two counts of rows and choices, and the
            # choices.
            common = result["one stage"][0]["control", "wire_bytes"] - sum(4 * 3 * local for local in layers)
            counts = inside + len(layers) * 4 * 2 * (NODES - 1)
            choices = 8 * rows["asked"] + 4 * rows["given"]
            assert sent["control", "wire_bytes"] - common == counts + choices, name


def test_the_start_reports_the_route_of_rows(tmp_path: Path) -> None:
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        num_experts=4,
        expert_model_parallel_size=4,
        train_iters=2,
        log_comm=True,
        log_interval=1,
        bf16=True,
        compress=["experts=default"],
    )
    for size, setting, effect in (
        (
            "2",
            "auto",
            "a token goes once to each of 2 nodes of 2 ranks that has experts for it, and is handed on there",
        ),
        ("4", "on", "no effect, its 4 ranks are on one node"),
        ("1", "on", "a token goes once to each rank that has experts for it (its 4 ranks are on nodes of their own)"),
        ("4", "auto", ""),
        ("2", "off", ""),
    ):
        asking = ["--moe-two-stage", setting]
        out = run_cli(4, ["pretrain_gpt.py", *flags, *asking], env={"LOCAL_WORLD_SIZE": size}).check().stdout
        notes = [line for line in out.splitlines() if "--moe-two-stage" in line]
        assert notes == ([f"note: --moe-two-stage {setting}: {effect}"] if effect else [])
        note = next(
            line for line in out.splitlines() if line.startswith("note: --compress experts=default stands for ")
        )
        assert "ep-combine-backward=fixpoint,bits=8,group=64" in note.split()
        assert "--compress ep-combine-forward=cast: the numbers have 16 bits as they are" in out.splitlines()
        line = next(line for line in out.splitlines() if "ep-dispatch-forward: " in line)
        assert ("inside nodes" in line) is (size == "2" and setting == "auto")
        share = next(line for line in out.splitlines() if "of the numbers that ep-dispatch-forward sends" in line)
        # Of six pairs of four experts five are partly on the other node; half of the choices are handed on inside it.
        assert ("compresses 45.5%" if size == "2" and setting == "auto" else "compresses 100.0%") in share

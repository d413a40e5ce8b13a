"""Sums in two levels in training runs, on ranks of this machine that LOCAL_WORLD_SIZE groups into nodes."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.identity import IdentityRounds
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.round_driver import PackedReduction, TensorReduction
from megatron.distributed.topology import build_topology
from megatron.training.compression_notes import node_notes
from tests.multiprocess.test_compression import STEPS, Changes, _run, _shallow, check_fall, train_and_compare
from tests.multiprocess.test_compressor_state import _changes, _load, _save, _sums, check_sums
from tests.multiprocess.test_resume import _stop_and_go_on
from tests.support.cli import run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

SPEC = "dp-grad=fixpoint,levels=8/4,error-feedback=on"
PAIRS = {"LOCAL_WORLD_SIZE": "2"}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}


class TwoLevelSum(RoundCompressor):
    """A plug-in's exact sum: within each node, then between nodes; and the group's ranks in the nodes' order."""

    traits = SumTraits(levels=True)

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        x_sent = x.clone()
        inside = yield Request(x, Op.REDUCE, level=Level.NODE)
        total = yield Request(inside, Op.REDUCE, level=Level.ACROSS)
        ranks = yield Request(torch.tensor([peers.rank]), Op.GATHER, level=Level.NODE)
        assert tuple(ranks.view(-1).tolist()) == peers.members(Level.NODE)
        rows = torch.full((len(peers.members(Level.ACROSS)), 1), peers.rank)
        ranks = yield Request(rows, Op.EXCHANGE, level=Level.ACROSS)
        assert tuple(ranks.view(-1).tolist()) == peers.members(Level.ACROSS)
        first = yield Request(torch.tensor([peers.rank]), Op.BROADCAST, level=Level.NODE)
        assert int(first) == peers.members(Level.NODE)[0]
        return Aggregate(total, x_sent)


class Undeclared(TwoLevelSum):
    """The same without a word about its levels."""

    traits = SumTraits()


def _plug_in(dp: int) -> list[str]:
    topology = build_topology(Layout(dp=dp), torch.device("cpu"), LaunchEnvironment.read().node, {"dp"})
    group, ledger = topology.dp, Ledger()
    xs = [torch.arange(size, dtype=torch.float64) + 10 * group.rank for size in (5, 3, 4)]
    kinds = [TwoLevelSum(), IdentityRounds(), TwoLevelSum()]
    jobs = [TensorReduction(kind, x, CompressorState()) for kind, x in zip(kinds, xs, strict=True)]
    PackedReduction(jobs, group, ledger, Point.DP_GRAD).finish()
    expected = [dp * torch.arange(size, dtype=torch.float64) + 10 * sum(range(dp)) for size in (5, 3, 4)]
    wrong = [str(x) for x, total in zip(xs, expected, strict=True) if not torch.equal(x, total)]
    account = ledger.take_totals()["dp-grad"]
    assert group.split is not None
    g = group.split.node.size
    # 9 numbers of the plug-ins are summed inside; 16 bytes of ranks are gathered, as many sent by the first.
    inside = 2 * (g - 1) * 72 // g + 2 * (g - 1) * 8 + (16 if group.split.node.rank == 0 else 0)
    if account["inside_bytes"] != inside:
        wrong.append(f"{account} instead of {inside}")
    try:
        PackedReduction(
            [TensorReduction(Undeclared(), xs[0], CompressorState())], topology.tp, ledger, Point.DP_GRAD
        ).finish()
    except CompressorFault as fault:
        if "SumTraits(levels=True)" not in str(fault):
            wrong.append(str(fault))
    else:
        wrong.append("a group without nodes served a node's request")
    return wrong


def test_a_plug_in_asks_for_levels_as_a_builtin_does() -> None:
    assert run_ranks(4, _plug_in, 4, env=PAIRS) == [[]] * 4


RUNS: dict[str, tuple[int, str, Changes, str]] = {
    "two nodes of two": (4, "2", _run(SPEC), "sums in two levels: 2 ranks of a node, then 2 nodes"),
    "stochastic and rotated, bf16, overlapped": (
        4,
        "2",
        _run(SPEC + ",rounding=stochastic,rotation=64", precision="bf16", **OVERLAP),
        "2 ranks of a node, then 2 nodes",
    ),
    "sharded": (4, "2", _run(SPEC, **SHARDED), "2 ranks of a node, then 2 nodes"),
    "sharded, rotated, fp16, overlapped": (
        4,
        "2",
        _run(SPEC + ",rotation=32", precision="fp16", **SHARDED, **OVERLAP),
        "2 ranks of a node, then 2 nodes",
    ),
    "tensor-parallel ranks that fill a node": (4, "2", _run(SPEC, tp=2), "its sums have one level, between nodes"),
    "one node": (2, "2", _run(SPEC), "are on one node, so its sums have one level, inside it"),
    "uneven nodes": (3, "2", {**_run(SPEC), "training": {"global_batch_size": 6}}, "nodes hold 2 or 1 of its 3 ranks"),
    "stages on nodes of their own, embedding too": (
        4,
        "2",
        _run(SPEC, "embedding=fixpoint,levels=8/4,fused=on", pp=2),
        "its 2 ranks are on one node",
    ),
    "pairs of replicas of two tensor-parallel ranks, sharded": (
        8,
        "4",
        _run(SPEC, tp=2, **SHARDED),
        "2 ranks of a node, then 2 nodes",
    ),
    "the embedding of two stages with four replicas each": (
        8,
        "4",
        _run("embedding=fixpoint,levels=8/4,fused=on,error-feedback=on", pp=2),
        "sums in two levels: 4 ranks of a node, then 2 nodes",
    ),
    "quantized adam, sharded": (
        4,
        "2",
        _run("dp-grad=quantized-adam,levels=8/6,warmup=4", **SHARDED),
        "2 ranks of a node, then 2 nodes",
    ),
}


def _noted(changes: Changes) -> tuple[list[float], list[str], list[str]]:
    trace, differences = train_and_compare(changes, STEPS)
    engines = tiny_engines(changes)
    return trace.losses, differences, node_notes(engines.plan, engines.topology)


REPEATS = (
    "two nodes of two",
    "sharded",
    "pairs of replicas of two tensor-parallel ranks, sharded",
    "the embedding of two stages with four replicas each",
)


@pytest.mark.parametrize("name", mark_repeats(RUNS, keep=RUNS.keys() - set(REPEATS)))
def test_replicas_agree_and_the_loss_falls(name: str) -> None:
    ranks, node_size, changes, note = RUNS[name]
    results = run_ranks(ranks, _noted, _shallow(changes), env={"LOCAL_WORLD_SIZE": node_size})
    assert [differences for _, differences, _ in results] == [[]] * ranks
    losses = results[-1][0]
    assert all(rank_losses == losses for rank_losses, _, _ in results)
    check_fall(losses)
    assert note in results[-1][2][0]


def _sent(changes: Changes) -> tuple[dict[str, float], list[int]]:
    """This rank's account of gradients over three steps, and the lengths of its buckets."""
    engines = tiny_engines(changes)
    tiny_train(engines, 1)
    engines.ledger.take_totals()
    lengths = [bucket.stop - bucket.start for buffer in engines.buffers for bucket in buffer.buckets]
    accounts: list[dict[str, float]] = []
    tiny_train(engines, 3, after_step=lambda e: accounts.append(e.ledger.take_totals()["dp-grad"]))
    assert all(account["wire_bytes"] == accounts[0]["wire_bytes"] for account in accounts)
    return accounts[0], lengths


@pytest.mark.parametrize("sharded", [False, True])
def test_the_ledger_says_what_stays_inside_nodes(sharded: bool) -> None:
    """Inside (G-1)/G n b1/8, and back with b2; between nodes (M-1)/M (n/G) b2/8 each way: per rank, with scales."""
    results = run_ranks(4, _sent, _run(SPEC, **(SHARDED if sharded else {})), env=PAIRS)
    eight, four = (Quantizer(FixpointConfig(bits=bits)) for bits in (8, 4))
    for account, lengths in results:
        shapes = [torch.Size((-(-length // 4),)) for length in lengths]
        inside = sum(2 * eight.nbytes(shape) + (0 if sharded else 2 * four.nbytes(shape)) for shape in shapes)
        across = sum((1 if sharded else 2) * four.nbytes(shape) for shape in shapes)
        assert account["inside_bytes"] == inside
        assert account["wire_bytes"] - account["inside_bytes"] == across
        n, scales = sum(lengths), 4 / 64
        assert inside == pytest.approx(n / 2 * (1 + scales) + (0 if sharded else n / 2 * (0.5 + scales)), rel=0.01)
        assert across == pytest.approx((1 if sharded else 2) * n / 2 / 2 * (0.5 + scales), rel=0.01)


@pytest.mark.parametrize(("parallel", "back"), [({}, 2), (SHARDED, 1)], ids=["whole", "sharded"])
def test_a_flat_sum_sends_only_shares_where_only_shares_are_read(parallel: dict[str, Any], back: int) -> None:
    quantizer = Quantizer(FixpointConfig(bits=4))
    for account, lengths in run_ranks(2, _sent, _run("dp-grad=fixpoint,bits=4", **parallel)):
        assert account["wire_bytes"] == back * sum(quantizer.nbytes(torch.Size((-(-n // 2),))) for n in lengths)
        assert account["inside_bytes"] == 0


def _ratio(changes: Changes) -> float:
    engines = tiny_engines(changes)
    trace = tiny_train(engines, 2)
    return trace.raw_by_point["tp-forward"] / trace.bytes_by_point["tp-forward"]


def test_sequence_parallel_sums_send_only_shares() -> None:
    """8 bits and a scale to 64 of them in place of fp32: 3.76 times fewer bytes, in reduce-scatters too."""
    for ratio in run_ranks(2, _ratio, _run("tp-forward=fixpoint", tp=2, sequence_parallel=True)):
        assert ratio == pytest.approx(3.76, rel=0.02)


def test_residuals_are_resharded(tmp_path: Path) -> None:
    """Saved by two nodes of two ranks; on two ranks, and with the sharded optimizer: their sum is kept."""
    expected = _sums(run_ranks(4, _save, _changes(SPEC), tmp_path, env=PAIRS))
    assert all(float(total.norm()) > 0 for total in expected.values())
    for ranks, parallel in ((2, {}), (4, SHARDED)):
        loaded = run_ranks(ranks, _load, _changes(SPEC, **parallel), tmp_path, env=PAIRS)
        check_sums(loaded, expected)
        assert all(lines == [] for _, lines in loaded)


@pytest.mark.parametrize("sharded", mark_repeats([False, True], keep=[False]))
def test_resume_is_exact(prefix: Path, tmp_path: Path, sharded: bool) -> None:
    flags: dict[str, Any] = {
        "fp16": True,
        "initial_loss_scale": 2**23,
        "loss_scale_window": 3,
        "compress": [SPEC + ",rounding=stochastic,rotation=32"],
        **(SHARDED if sharded else {}),
    }
    losses, resumed_losses = _stop_and_go_on(prefix, tmp_path, (4, 4), flags, flags, 10, env=PAIRS)
    assert len(losses) == 10
    assert resumed_losses == losses
    assert any(norm is None for _, norm in losses.values()), "no step was skipped: the case tests nothing"


def test_the_start_reports_two_level_sums_in_one_line(prefix: Path) -> None:
    flags = tiny_flags(prefix, compress=[SPEC], train_iters=2, log_comm=True, log_interval=1)
    out = run_cli(4, ["pretrain_gpt.py", *flags], env=PAIRS).check().stdout
    assert "inside nodes, coded" in next(line for line in out.splitlines() if "dp-grad: " in line)
    notes = [line for line in out.splitlines() if "levels" in line and line.startswith("note:")]
    assert notes == ["note: --compress dp-grad=fixpoint: sums in two levels: 2 ranks of a node, then 2 nodes"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp-grad=fixpoint,levels=8/9", "write the bits inside a node"),
        ("dp-grad=fixpoint,levels=8/4,bits=4", "leave bits out"),
        ("tp-forward=fixpoint,levels=8/4", "write bits=4 here"),
        ("pp-forward=delta,levels=8/4", "delta has no option 'levels'"),
    ],
)
def test_bad_options_end_the_run_with_one_line(prefix: Path, spec: str, message: str) -> None:
    flags = tiny_flags(prefix, compress=[spec], tensor_model_parallel_size=2)
    result = run_cli(2, ["pretrain_gpt.py", *flags])
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 2
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in result.stderr

"""Sums in two levels: the plain sum to within the steps of the grids, conservation, and bytes by formula."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.api import Level, Op, Peers, Request
from megatron.compression.builtin import BUILTIN
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback
from megatron.compression.fixpoint import FixpointConfig, FixpointRounds, FixpointSumConfig, Quantizer
from megatron.compression.lockstep import run_lockstep
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.quantized_adam import QuantizedAdam, QuantizedAdamConfig
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_spec
from megatron.compression.state import CompressorState
from megatron.kernels.reference import rotate
from tests.support.combinations import mark_repeats, pairwise

Nodes = tuple[tuple[int, ...], ...]


def nodes_of(nodes: int, ranks: int, mixed: int = 0) -> Nodes:
    """Ranks by node: consecutive, or ``mixed`` by a seed."""
    order = list(range(nodes * ranks))
    if mixed:
        random.Random(mixed).shuffle(order)
    return tuple(tuple(sorted(order[node * ranks : (node + 1) * ranks])) for node in range(nodes))


def noise(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def states_of(size: int) -> list[CompressorState]:
    return [CompressorState() for _ in range(size)]


LAYOUTS = pairwise([1, 2, 3, 4], [1, 2, 3, 4], [0, 16], [False, True])
"""Nodes, ranks of a node, rotation, and whether the sum is sharded."""


@pytest.mark.parametrize(
    ("nodes", "ranks", "rotation", "sharded"),
    # A rank, a node alone, single ranks, equal and unequal numbers; with eight ranks, rotated and sharded.
    mark_repeats(LAYOUTS, [row for row in LAYOUTS if row[:2] in {(1, 1), (1, 2), (3, 1), (2, 2), (2, 3), (2, 4)}]),
)
def test_the_sum_is_within_the_steps_of_the_grids_of_the_plain_sum(
    nodes: int, ranks: int, rotation: int, sharded: bool
) -> None:
    """Each quantization on the way is off by at most half a step of its grid."""
    size = nodes * ranks
    compressor = FixpointRounds(FixpointSumConfig(levels="8/6", group=16, rotation=rotation))
    for count in (0, 1, size - 1, 7, 97, 24 * size):
        xs = [noise(count, 100 * count + rank) for rank in range(size)]
        expected = torch.stack(xs).sum(dim=0)
        results = run_lockstep(compressor, xs, states_of(size), sharded, nodes=nodes_of(nodes, ranks, mixed=count % 3))
        all_read = not sharded or count % size
        if all_read:
            assert all(torch.equal(result.total, results[0].total) for result in results)
            total = results[0].total
        else:
            total = torch.cat([r.total.chunk(size)[i] if count else r.total for i, r in enumerate(results)])[:count]
        # Largest magnitudes: of a rank's numbers, of a node's sum, of the sum; the rotation spreads an error.
        peak = max((float(x.abs().max()) for x in xs), default=0.0) if count else 0.0
        spread = rotation**0.5 if rotation else 1.0
        worst = size * peak / 127 + (nodes + 1) * size * peak / 31
        assert float((total - expected).abs().max() if count else 0.0) <= spread * worst
        assert float((total - expected).norm()) <= 0.12 * float(expected.norm()) + 1e-12


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 3),
    ranks=st.integers(1, 3),
    count=st.integers(0, 200),
    levels=st.sampled_from(["8/4", "4/2", "1/1", "2/8"]),
    rotation=st.sampled_from([0, 8, 32]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    sharded=st.booleans(),
    kind=st.sampled_from(["local", "aggregate"]),
    mixed=st.integers(0, 3),
)
def test_sums_and_residuals_add_up_to_the_inputs(
    nodes: int,
    ranks: int,
    count: int,
    levels: str,
    rotation: int,
    rounding: Any,
    sharded: bool,
    kind: Any,
    mixed: int,
) -> None:
    size = nodes * ranks
    inner = FixpointRounds(FixpointSumConfig(levels=levels, group=8, rotation=rotation, rounding=rounding))
    compressor, states = ErrorFeedback(inner, kind), states_of(size)
    inputs_sum, summed = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for step in range(4):
        xs = [noise(count, 1000 * step + rank) for rank in range(size)]
        inputs, step_taken = torch.stack(xs).sum(dim=0), step != 1
        results = run_lockstep(compressor, xs, states, sharded, step_taken, nodes_of(nodes, ranks, mixed))
        for state in states:
            state.commit() if step_taken else state.rollback()
        if not step_taken:
            continue
        inputs_sum += inputs
        shares = sharded and kind == "local" and count and count % size == 0
        summed += torch.cat([r.total.chunk(size)[i] for i, r in enumerate(results)]) if shares else results[0].total
        residual = torch.stack([state.tensors[RESIDUAL] for state in states]).sum(dim=0)
        # A rotation is computed in fp32.
        torch.testing.assert_close(summed + residual, inputs_sum, rtol=0, atol=2e-5 if rotation else 1e-10)


@pytest.mark.parametrize("levels", ["flat", "4/8"])
def test_noise_of_equal_numbers_on_many_ranks_averages_out(levels: str) -> None:
    """With independent noise on each rank, the error of the mean of n ranks falls with 1/sqrt(n)."""
    x, off = noise(4096, 0), {}
    for size in (2, 8, 32):
        bits = 4 if levels == "flat" else 8
        compressor = FixpointRounds(FixpointSumConfig(levels=levels, bits=bits, rounding="stochastic"))
        # Each rank reads its share alone, so the sum itself is not quantized.
        results = run_lockstep(
            compressor, [x.clone() for _ in range(size)], states_of(size), True, nodes=nodes_of(1, size)
        )
        total = torch.cat([result.total.chunk(size)[rank] for rank, result in enumerate(results)])
        off[size] = float((total / size - x).norm())
    assert off[8] == pytest.approx(off[2] / 2, rel=0.1)
    assert off[32] == pytest.approx(off[2] / 4, rel=0.1)


def test_all_messages_of_a_sum_have_different_seeds() -> None:
    """Over all ranks and steps, with and without levels."""
    for levels, nodes in (("flat", ()), ("8/4", nodes_of(2, 3)), ("8/4", nodes_of(1, 6)), ("8/4", nodes_of(6, 1))):
        drawn: list[int | None] = []

        class Recorded(FixpointRounds):
            def seed(self, state: CompressorState, message: int) -> int | None:
                drawn.append(super().seed(state, message))  # noqa: B023
                return drawn[-1]  # noqa: B023

        bits = 4 if levels == "flat" else 8
        compressor, states = Recorded(FixpointSumConfig(levels=levels, bits=bits, rounding="stochastic")), states_of(6)
        for _ in range(2):
            run_lockstep(compressor, [noise(60, rank) for rank in range(6)], states, nodes=nodes)
            for state in states:
                state.commit()
        assert len(set(drawn)) == len(drawn) >= 2 * 6 * 7


def test_the_error_of_requantization_stays_on_the_rank_that_requantizes() -> None:
    """The inner grid represents these numbers exactly, so all error arises between nodes."""
    size, count = 4, 16
    compressor = ErrorFeedback(FixpointRounds(FixpointSumConfig(levels="8/2", group=8)))
    states, nodes = states_of(size), nodes_of(2, 2)
    xs = [torch.full((count,), 127.0, dtype=torch.float64) for _ in range(size)]
    for rank, x in enumerate(xs):
        x[1::4] = rank + 1.0  # a multiple of the inner step, far below the outer one
    run_lockstep(compressor, xs, states, nodes=nodes)
    for state in states:
        state.commit()
    residuals = torch.stack([state.tensors[RESIDUAL] for state in states])
    # A rank sums the shares of its position in the node, for both nodes: 0 and 2, or 1 and 3.
    for rank in range(size):
        summed_shares = [share for share in range(size) if share % 2 == rank % 2]
        assert [bool(residuals[rank].view(size, -1)[share].any()) for share in range(size)] == [
            p in summed_shares for p in range(size)
        ]
    # The grid of two bits has no level between 0 and 254: each node's sum of small numbers stays on one of its ranks.
    assert [float(residuals[rank].view(size, -1)[0, 1]) for rank in (0, 2)] == [1.0 + 2.0, 3.0 + 4.0]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 4), (4, 2)])
def test_bytes_are_those_of_the_formula(nodes: int, ranks: int, sharded: bool) -> None:
    """(G-1)/G n b1/8 inside a node and back with b2, (M-1)/M (n/G) b2/8 between nodes each way, and the scales."""
    size, group = nodes * ranks, 64
    count = size * 1024
    compressor = FixpointRounds(FixpointSumConfig(levels="8/4", group=group))
    requests: list[Request] = []
    run_lockstep(
        compressor,
        [noise(count, r) for r in range(size)],
        states_of(size),
        sharded,
        nodes=nodes_of(nodes, ranks),
        requests=requests,
    )
    sent = {Level.NODE: 0, Level.ACROSS: 0}
    for request in requests:
        members = ranks if request.level is Level.NODE else nodes
        numel = request.tensor.numel()
        sent[request.level] += (members - 1) * (numel // members if request.op is Op.EXCHANGE else numel)
    inside, across = (ranks - 1) / ranks * count, (nodes - 1) / nodes * count / ranks
    scales = 4 / group
    back = 0 if sharded else 1
    assert sent[Level.NODE] == inside * (1 + scales) + back * inside * (0.5 + scales)
    assert sent[Level.ACROSS] == (1 + back) * across * (0.5 + scales)


@pytest.mark.parametrize(("nodes", "bits"), [(((0,), (1,), (2,), (3,)), 4), (((0, 1, 2, 3),), 8)])
def test_one_rank_to_a_node_or_one_node_is_the_flat_sum(nodes: Nodes, bits: int) -> None:
    """Bit by bit, with the bits of the only level."""
    levels = FixpointRounds(FixpointSumConfig(levels="8/4", rounding="stochastic", rotation=16))
    flat = FixpointRounds(FixpointConfig(bits=bits, rounding="stochastic", rotation=16))
    xs = [noise(333, rank) for rank in range(4)]
    level_sum, flat_sum = (
        run_lockstep(compressor, [x.clone() for x in xs], states_of(4), nodes=nodes)[0].total
        for compressor in (levels, flat)
    )
    assert torch.equal(level_sum, flat_sum)


def test_noise_depends_on_the_seed_and_the_step_alone() -> None:
    compressor = FixpointRounds(FixpointSumConfig(levels="4/2", rounding="stochastic"))
    xs = [noise(500, rank) for rank in range(6)]

    def total(step: int, seed: int = 714) -> Tensor:
        rounds = FixpointRounds(FixpointSumConfig(levels="4/2", rounding="stochastic", seed=seed))
        states = [CompressorState(counters={"messages": step}) for _ in xs]
        return run_lockstep(rounds, [x.clone() for x in xs], states, nodes=nodes_of(3, 2))[0].total

    assert compressor.config.seed == 714
    assert torch.equal(total(3), total(3))
    assert not torch.equal(total(3), total(4))
    assert not torch.equal(total(3), total(3, seed=1))


def test_stochastic_sums_are_unbiased() -> None:
    """The mean over many groups and steps is closer than the steps of the grids, with equal numbers on all nodes."""
    size, count, groups, steps = 4, 64, 40, 10
    compressor = FixpointRounds(FixpointSumConfig(levels="4/3", rounding="stochastic", group=count))
    states, x = states_of(size), noise(count, 5)
    mean = torch.zeros(count, dtype=torch.float64)
    for _ in range(steps):
        xs = [x.repeat(groups) for _ in range(size)]
        total = run_lockstep(compressor, xs, states, nodes=nodes_of(2, 2))[0].total
        mean += total.view(groups, count).mean(dim=0) / steps
        for state in states:
            state.commit()
    step = float(x.abs().max()) * size / 3
    assert float((mean - size * x).abs().max()) < 0.2 * step


def test_sums_are_quantized_in_the_rotated_basis() -> None:
    """The sum of rotated numbers is quantized without another rotation, and rotated back at the very end."""
    size, rotation = 4, 32
    xs = [noise(size * 3 * rotation, rank, torch.float32) for rank in range(size)]
    rotated = FixpointRounds(FixpointSumConfig(levels="5/3", rotation=rotation, group=32))
    plain = FixpointRounds(FixpointSumConfig(levels="5/3", group=32))
    turned = [rotate(x, rotation) for x in xs]
    totals = [
        run_lockstep(compressor, inputs, states_of(size), nodes=nodes_of(2, 2))[0].total
        for compressor, inputs in ((rotated, xs), (plain, turned))
    ]
    torch.testing.assert_close(totals[0], rotate(totals[1], rotation), rtol=0, atol=1e-5)


def test_a_sharded_sum_exchanges_shares_only() -> None:
    """No all-gather; each share is the sum of the messages, not quantized again."""
    for nodes in ((), nodes_of(2, 2)):
        compressor = FixpointRounds(FixpointSumConfig(levels="8/4") if nodes else FixpointConfig(bits=4))
        requests: list[Request] = []
        xs = [noise(4 * 64, rank) for rank in range(4)]
        results = run_lockstep(compressor, xs, states_of(4), sharded=True, nodes=nodes, requests=requests)
        assert {request.op for request in requests} == {Op.EXCHANGE}
        local = torch.stack([result.local for result in results]).sum(dim=0)
        for rank, result in enumerate(results):
            torch.testing.assert_close(result.total.chunk(4)[rank], local.chunk(4)[rank], rtol=0, atol=1e-12)


def test_levels_set_the_bits_and_invalid_levels_are_refused() -> None:
    assert FixpointSumConfig(levels="8/4").level_bits == (8, 4)
    assert FixpointSumConfig(bits=5).level_bits == (None, 5)
    for levels in ("8", "9/4", "8/0", "8/4/2", "8-4", "8/4\n"):
        with pytest.raises(UserError, match="such as levels=8/4"):
            FixpointSumConfig(levels=levels)
    with pytest.raises(UserError, match="levels=8/4 sets the bits; leave bits out"):
        FixpointSumConfig(bits=4, levels="8/4")


@pytest.mark.parametrize("point", ["pp-forward", "pp-backward", "param-gather", "tp-forward", "tp-backward"])
def test_levels_are_refused_at_points_without_sums_over_nodes(point: str) -> None:
    spec = read_spec(f"{point}=fixpoint,levels=8/4", Registry(BUILTIN), RunLength(10))
    assert "levels=8/4 is for sums of gradients" in spec.make_compressor().check(spec.point, {})
    assert "write bits=4 here" in spec.make_compressor().check(spec.point, {})


@pytest.mark.parametrize("text", ["dp-grad=fixpoint", "embedding=fixpoint", "dp-grad=quantized-adam,warmup=9"])
def test_a_compressor_declares_its_levels(text: str) -> None:
    for option, expected in (("", False), (",levels=8/4", True)):
        spec = read_spec(text + option, Registry(BUILTIN), RunLength(10))
        assert spec.make_rounds().traits.levels is expected
    if "quantized" not in text:
        assert spec.make_rounds().check(Point.DP_GRAD, {}) == ""


def test_peers_know_the_members_of_each_level() -> None:
    nodes = ((0, 3), (1, 2))
    peers = Peers(2, 4, nodes)
    assert peers.members(Level.ALL) == (0, 1, 2, 3)
    assert peers.members(Level.NODE) == (1, 2)
    assert peers.members(Level.ACROSS) == (2, 3)
    with pytest.raises(CompressorFault, match="SumTraits"):
        Peers(2, 4).members(Level.NODE)


def test_quantized_adam_needs_whole_momenta_in_sharded_sums() -> None:
    """Quantized Adam enters all of the last momentum into the next sum, whatever share of the sum a rank reads."""
    compressor = QuantizedAdam(QuantizedAdamConfig(levels="8/4"))
    totals: list[list[Tensor]] = []
    for sharded in (False, True):
        states = states_of(4)
        for step in range(4):
            xs = [noise(4 * 96, 10 * step + rank, torch.float32) for rank in range(4)]
            results = run_lockstep(compressor, xs, states, sharded, nodes=nodes_of(2, 2))
            for state in states:
                state.commit()
        totals.append([result.total.chunk(4)[rank] for rank, result in enumerate(results)])
    assert all(torch.equal(full, share) for full, share in zip(*totals, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_in_one_level_decodes_each_message_once(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the residual, a rank decodes its messages of the input and of the sum, once."""
    decoded: list[int] = []
    add_to, decode = Quantizer.add_to, Quantizer.decode

    def adding(self: Quantizer, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        decoded.append(out.numel())
        return add_to(self, out, wire, negative)

    def decoding(self: Quantizer, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        decoded.append(shape.numel())
        return decode(self, wire, shape, out)

    monkeypatch.setattr(Quantizer, "add_to", adding)
    monkeypatch.setattr(Quantizer, "decode", decoding)
    rounds = FixpointRounds(FixpointSumConfig(bits=8)).rounds(noise(24, 1), CompressorState(), Peers(0, ranks))
    sent = next(rounds)
    share = rounds.send(sent.tensor)
    with pytest.raises(StopIteration) as end:
        rounds.send(torch.stack([share.tensor] * ranks))
    assert sum(decoded) == 24  # errors are computed on demand only
    end.value.value.local.subtract_from(noise(24, 1))
    assert sum(decoded) == 24 + 24 // ranks + 24
    end.value.value.local.subtract_from(noise(24, 1))
    assert sum(decoded) == 24 + 24 // ranks + 2 * 24

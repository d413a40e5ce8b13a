"""The communication points with toy compressors: several rounds, lossy codecs, orders, bytes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, Op, Payload, Peers, Request, RoundCompressor
from megatron.compression.builtin import BUILTIN
from megatron.compression.delta import DeltaConfig
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, read_specs
from megatron.compression.state import CompressorState
from megatron.distributed.compressed_gather import PendingGather
from megatron.distributed.group import Group, Pending
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan, Position
from megatron.distributed.round_driver import PackedReduction, TensorReduction
from megatron.distributed.work import Work
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from megatron.parallel.pipeline.channel import Message, PipelineChannel
from tests.support.spawn import run_ranks


def _group() -> Group:
    size = dist.get_world_size()
    return Group(dist.group.WORLD, tuple(range(size)), dist.get_rank(), "everyone", "gloo")


class NoRounds(RoundCompressor):
    """Sends nothing: the sum is guessed to be zero."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        yield from ()
        return Aggregate(torch.zeros_like(x), torch.zeros_like(x))


class ThreeRounds(RoundCompressor):
    """The exact sum in a roundabout way: a gather, an exchange of halves, and a broadcast of rank 0's scale."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        calls = state.count("calls")
        state.stage("calls", calls + 1)
        gathered = yield Request(x.clone(), Op.GATHER)
        scale = yield Request(torch.full((1,), float(peers.rank + 1), dtype=x.dtype), Op.BROADCAST)
        rows = x.reshape(1, -1).repeat(peers.size, 1)
        exchanged = yield Request(rows, Op.EXCHANGE)
        again = yield Request(x.clone())
        assert torch.equal(exchanged.sum(dim=0).view(x.shape), gathered.sum(dim=0))
        torch.testing.assert_close(again, gathered.sum(dim=0))
        return Aggregate(gathered.sum(dim=0) * scale, x)


def _values(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _mixed_rounds() -> list[str]:
    """Algorithms with different numbers of rounds share collectives and each get their own results."""
    group, ledger = _group(), Ledger()
    shapes = [(3, 2), (5,), (1, 7), (0,), (4,)]
    compressors = [ThreeRounds(), IdentityRounds(), NoRounds(), IdentityRounds(), ThreeRounds()]
    states = [CompressorState() for _ in shapes]
    xs = [_values(group.rank, shape) for shape in shapes]
    jobs = [TensorReduction(*job) for job in zip(compressors, xs, states, strict=True)]
    PackedReduction(jobs, group, ledger, Point.DP_GRAD, raw_bytes=1000).finish()
    totals = xs
    wrong = []
    for i, shape in enumerate(shapes):
        expected = torch.stack([_values(rank, shape) for rank in range(group.size)]).sum(dim=0)
        if i == 2:
            expected.zero_()
        if totals[i].shape != expected.shape or not torch.allclose(totals[i], expected, atol=1e-12):
            wrong.append(f"tensor {i}")
    n = group.size
    if n == 1:
        return wrong + [str(ledger.accounts)] * bool(ledger.take_totals())
    account = ledger.take_totals()["dp-grad"]
    three = sum((n - 1) * 8 * k + (8 if group.rank == 0 else 0) + (n - 1) * 8 * k for k in (6, 4))
    reduced = [2 * (n - 1) * 8 * k // n for k in (5 + 0, 6 + 4)]
    if account["raw_bytes"] != 1000 or account["wire_bytes"] != three + sum(reduced):
        wrong.append(f"{account} instead of {three} + {reduced}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_algorithms_of_several_rounds_run_together(ranks: int) -> None:
    assert run_ranks(ranks, _mixed_rounds) == [[]] * ranks


class CountingGroup(Group):
    """A group that notes its operations."""

    def __init__(self) -> None:
        group = _group()
        super().__init__(group.pg, group.ranks, group.rank, group.name, group.backend)
        self.operations: list[str] = []

    def start(self, operation: str, sent: int, call: Callable[[], Work | None]) -> Pending:
        self.operations.append(operation)
        return super().start(operation, sent, call)


def _quantized_factors() -> tuple[list[str], list[float]]:
    """Operations of a reduction of three stacks of matrices and a vector; and its result's differences from that of
    each stack alone."""
    compressor, group = PowerSGD(PowerSGDConfig(rank=2, factors="fixpoint8")), CountingGroup()
    shapes = [(2, 8, 6), (1, 6, 8), (3, 5, 4)]

    def reduced(members: list[int], over: Group) -> list[Tensor]:
        jobs = [TensorReduction(compressor, _values(9 * i + group.rank, shapes[i]), CompressorState()) for i in members]
        exact = TensorReduction(IdentityRounds(), _values(group.rank, (5,)), CompressorState())
        PackedReduction([*jobs, exact], over, Ledger(), Point.DP_GRAD).finish()
        return [job.x for job in jobs]

    together = reduced([0, 1, 2], group)
    alone = [reduced([i], _group())[0] for i in range(3)]
    return group.operations, [float((a - b).abs().max()) for a, b in zip(together, alone, strict=True)]


def test_messages_of_the_same_round_share_collectives() -> None:
    """However many shapes there are, the factors of all take two exchanges and two gathers."""
    for operations, differences in run_ranks(3, _quantized_factors):
        assert sorted(operations) == ["all-gather", "all-gather", "all-reduce", "all-to-all", "all-to-all"]
        assert differences == [0.0, 0.0, 0.0]


def _reduce_in_odd_orders(sharded: bool) -> list[str]:
    """Ranks mark buckets ready in different orders, without waiting for each other."""
    group, ledger = _group(), Ledger()
    sizes = [12, 24, 6, 36]
    flats = [_values(10 * group.rank + i, (size,)) for i, size in enumerate(sizes)]
    buckets = [GradBucket(flat, (ParamRange(f"p{i}", 0, (flat.numel(),)),)) for i, flat in enumerate(flats)]
    reducer = GradReducer(buckets, group, CompressionPlan({}), ledger, sharded)
    wrong = []
    for step in range(2):
        for i, flat in enumerate(flats):
            flat.copy_(_values(100 * step + 10 * group.rank + i, (sizes[i],)))
        reducer.begin_step(step, 1.0)
        order = [(i * (group.rank + 1) + group.rank) % 3 for i in range(2)]
        for i in order:
            reducer.mark_ready(i)
        reducer.finish_reduction()
        for i, flat in enumerate(flats):
            expected = torch.stack(
                [_values(100 * step + 10 * rank + i, (sizes[i],)) for rank in range(group.size)]
            ).sum(dim=0)
            share = sizes[i] // group.size
            shard = slice(group.rank * share, (group.rank + 1) * share) if sharded else slice(None)
            if not torch.allclose(flat[shard], expected[shard], atol=1e-12):
                wrong.append(f"step {step} bucket {i}")
    sent = ledger.take_totals()["dp-grad"]
    formula = 2 * sum((1 if sharded else 2) * (group.size - 1) * 8 * size // group.size for size in sizes)
    if (sent["wire_bytes"], sent["raw_bytes"]) != (formula, formula):
        wrong.append(f"{sent} instead of {formula}")
    return wrong


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_are_summed_in_any_order_of_readiness(ranks: int, sharded: bool) -> None:
    assert run_ranks(ranks, _reduce_in_odd_orders, sharded) == [[]] * ranks


class HalfCodec(Codec):
    """fp16 on the wire, and a count of the messages at both ends."""

    shared = ("count",)

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(shape, dtype=torch.float16, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        state.stage("count", state.count("count") + 1)
        return Payload(x.to(torch.float16))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        state.stage("count", state.count("count") + 1)
        return payload.wire.to(dtype)


def _gather_lossy() -> list[str]:
    group, ledger = _group(), Ledger()
    x = _values(group.rank, (2, 3)).float()
    out = torch.empty(2 * group.size, 3)
    result = PendingGather(HalfCodec(), x, CompressorState(), None, group, ledger, Point.PARAM_GATHER, out=out).wait()
    expected = torch.cat([_values(rank, (2, 3)).float().half().float() for rank in range(group.size)])
    account = ledger.take_totals()["param-gather"]
    wrong = [] if torch.equal(result, expected) and result is out else ["values"]
    if (account["wire_bytes"], account["raw_bytes"]) != ((group.size - 1) * 12, (group.size - 1) * 24):
        wrong.append(str(account))
    return wrong


def test_a_lossy_gather_is_the_same_everywhere() -> None:
    """This rank's own part, too, equals the part that others decoded: replicas must not differ."""
    assert run_ranks(3, _gather_lossy) == [[]] * 3


SHAPE = torch.Size((4, 1, 6))


def _channel(scale: float) -> list[str]:
    """Two stages, three micro-batches both ways, all receives posted ahead."""
    group, ledger = _group(), Ledger()
    entry = Registration(type(None), codec=HalfCodec)
    specs = {point: Spec(point, "half", entry, None) for point in (Point.PP_FWD, Point.PP_BWD)}
    plan = CompressionPlan(specs, group.rank, 2)
    other = Group(dist.new_group(list(group.ranks)), group.ranks, group.rank, "backward", "gloo")
    channel = PipelineChannel(Layout(pp=2), group, other, plan, ledger, [SHAPE], torch.float32, torch.device("cpu"))
    wrong = []
    for step in range(2):
        positions = [Position(step, 0, m) for m in range(3)]
        sending, receiving = (
            (channel.forward, channel.backward) if group.rank == 0 else (channel.backward, channel.forward)
        )
        channel.post([Message(receiving, position, position.micro_batch, scale) for position in positions])
        for position in positions:
            x = _values(position.micro_batch + 10 * group.rank, SHAPE).float() * 1e-4 * scale
            channel.send(Message(sending, position, position.micro_batch, scale), x)
        for position in reversed(positions):
            got = channel.recv(Message(receiving, position, position.micro_batch, scale))
            sent = _values(position.micro_batch + 10 * (1 - group.rank), SHAPE).float() * 1e-4 * scale
            unscaled = sent / scale if receiving.point is Point.PP_BWD else sent
            expected = unscaled.half().float() * (scale if receiving.point is Point.PP_BWD else 1.0)
            if not torch.equal(got, expected):
                wrong.append(f"step {step} micro-batch {position.micro_batch}")
        channel.flush()
        for state in channel.states():
            state.commit()
    counts = [state.count("count") for state in channel.states()]
    if counts != [6, 6]:
        wrong.append(f"messages seen: {counts}")
    account = ledger.take_totals()[sending.point.value]
    if (account["messages"], account["wire_bytes"], account["raw_bytes"]) != (6, 6 * 48, 6 * 96):
        wrong.append(str(account))
    return wrong


def _exchange_through_mailboxes() -> list[str]:
    """Two stages whose messages leave before their receivers know them; then some whose receives are posted."""
    group, ledger = _group(), Ledger()
    texts = ["pp-forward=cast,warmup=1", "pp-backward=cast,warmup=1"]
    plan = CompressionPlan(read_specs(texts, Registry(BUILTIN), RunLength()), group.rank, 2)
    other = Group(dist.new_group(list(group.ranks)), group.ranks, group.rank, "backward", "gloo")
    channel = PipelineChannel(Layout(pp=2), group, other, plan, ledger, [SHAPE], torch.float32, torch.device("cpu"))
    sending, receiving = (channel.forward, channel.backward)[:: 1 if group.rank == 0 else -1]
    wrong = []

    def send(step: int) -> None:
        for m in range(3):
            x = _values(10 * step + m + 100 * group.rank, SHAPE).float()
            channel.send(Message(sending, Position(step, 0, m), m), x)
        channel.flush()

    def receive(step: int) -> None:
        for m in range(3):
            received = channel.recv(Message(receiving, Position(step, 0, m), m))
            sent = _values(10 * step + m + 100 * (1 - group.rank), SHAPE).float()
            if not torch.equal(received, sent if step == 0 else sent.bfloat16().float()):
                wrong.append(f"step {step} micro-batch {m}")

    channel.open_mailboxes(3)
    for step in range(3):  # the first has messages of twice the size
        send(step)
        group.barrier()
        receive(step)
    channel.close_mailboxes()
    channel.post([Message(receiving, Position(3, 0, m), m) for m in range(3)])
    send(3)
    receive(3)
    return wrong


def test_messages_leave_before_their_receivers_know_them() -> None:
    """Without an open mailbox, a sender waits until the receive has been posted."""
    assert run_ranks(2, _exchange_through_mailboxes) == [[]] * 2


def _first_visits(first_bits: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """An unseen activation as the second stage receives it, and the bytes on the wire."""
    group, ledger = _group(), Ledger()
    spec = Spec(Point.PP_FWD, "delta", BUILTIN["delta"], DeltaConfig(first_bits=first_bits))
    plan = CompressionPlan({Point.PP_FWD: spec}, group.rank, 2)
    channel = PipelineChannel(Layout(pp=2), group, group, plan, ledger, [SHAPE], dtype, torch.device("cpu"))
    message, x = Message(channel.forward, Position(0, 0, 0), (5,)), _values(0, SHAPE).to(dtype)
    if group.rank == 0:
        channel.send(message, x)
        channel.flush()
        return x, int(ledger.take_totals()["pp-forward"]["wire_bytes"])
    channel.post([message])
    return channel.recv(message), 0


@pytest.mark.parametrize(
    ("first_bits", "dtype", "width"),
    [(16, torch.float16, 2), (16, torch.bfloat16, 2), (32, torch.float16, 2), (32, torch.float32, 4)],
    ids=str,
)
def test_a_first_visit_sends_the_activation_unchanged(first_bits: int, dtype: torch.dtype, width: int) -> None:
    (sent, nbytes), (got, _) = run_ranks(2, _first_visits, first_bits, dtype)
    assert got.dtype == dtype
    assert torch.equal(sent, got)
    assert nbytes == SHAPE.numel() * width


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_messages_of_both_directions_are_decoded_without_the_loss_scale(scale: float) -> None:
    assert run_ranks(2, _channel, scale) == [[]] * 2

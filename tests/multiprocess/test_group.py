"""Collectives over gloo, against plain torch on all ranks' inputs; and their bytes on the wire."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.distributed.errors import CommunicationError
from megatron.distributed.group import Group
from megatron.distributed.host_staging import StagedGroup
from megatron.distributed.layout import Layout
from megatron.distributed.pipeline_group import PipelineGroup
from megatron.distributed.process_group import LaunchEnvironment, init_process_group
from megatron.distributed.topology import build_topology
from tests.support.spawn import RankFailure, run_ranks

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (0, 1, 3, 7, 1000)


def _world() -> Group:
    size = dist.get_world_size()
    return Group(dist.group.WORLD, tuple(range(size)), dist.get_rank(), "world", "gloo")


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers: sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + 1)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def _staged_world() -> Group:
    """The same group for tensors of a device; all of it is done by the CPU here."""
    world = _world()
    return StagedGroup(world.pg, world.ranks, world.rank, world.name, world.backend)


GROUPS = {"plain": _world, "staged": _staged_world}


def _check_collectives(kind: str) -> list[str]:
    """Returns the errors."""
    group, wrong = GROUPS[kind](), []
    n, rank = group.size, group.rank

    def check(name: str, got: torch.Tensor, expected: torch.Tensor, sent: int, formula: int) -> None:
        if not torch.equal(got, expected):
            wrong.append(f"{name}: {got} instead of {expected}")
        if sent != formula:
            wrong.append(f"{name}: says {sent} bytes instead of {formula}")

    for dtype in DTYPES:
        for size in SIZES:
            name = f"{dtype} {size}"
            everyones = [_values(r, (size,), dtype) for r in range(n)]
            nbytes = size * dtype.itemsize

            x = everyones[rank].clone()
            pending = group.all_reduce(x)
            pending.wait()
            check(
                f"all_reduce {name}",
                x,
                torch.stack(everyones).sum(dim=0),
                pending.sent_bytes,
                2 * (n - 1) * nbytes // n,
            )

            x = everyones[rank].clone()
            pending = group.all_reduce_numbers(x)
            pending.wait()
            check(f"numbers {name}", x, torch.stack(everyones).sum(dim=0), pending.sent_bytes, (n - 1) * nbytes)

            x = everyones[rank].clone()
            group.all_reduce(x, dist.ReduceOp.MAX).wait()
            check(f"maximum {name}", x, torch.stack(everyones).amax(dim=0), 0, 0)

            out = torch.full((n * size,), -99.0, dtype=dtype)
            pending = group.all_gather(out, everyones[rank].clone())
            pending.wait()
            check(f"all_gather {name}", out, torch.cat(everyones), pending.sent_bytes, (n - 1) * nbytes)

            out = torch.full((n * size,), -99.0, dtype=dtype)
            shard = out[rank * size : (rank + 1) * size]
            shard.copy_(everyones[rank])
            group.all_gather(out, shard).wait()
            check(f"all_gather in place {name}", out, torch.cat(everyones), 0, 0)

            x = everyones[rank].clone()
            pending = group.broadcast(x, src=n - 1)
            pending.wait()
            check(f"broadcast {name}", x, everyones[n - 1], pending.sent_bytes, nbytes if rank == n - 1 else 0)

            rows = [_values(r, (n * size, 2), dtype) for r in range(n)]
            expected = torch.stack(rows).sum(dim=0)[rank * size : (rank + 1) * size]
            x, out = rows[rank].clone(), torch.full((size, 2), -99.0, dtype=dtype)
            pending = group.reduce_scatter(out, x)
            pending.wait()
            check(f"reduce_scatter {name}", out, expected, pending.sent_bytes, 2 * (n - 1) * nbytes)
            shard = x[rank * size : (rank + 1) * size]
            group.reduce_scatter(shard, x).wait()
            check(f"reduce_scatter in place {name}", shard, expected, 0, 0)

            received = torch.empty(size, dtype=dtype)
            receiving = group.recv(received, (rank - 1) % n, tag=3)
            pending = group.send(everyones[rank], (rank + 1) % n, tag=3)
            pending.wait()
            receiving.wait()
            check(f"send {name}", received, everyones[rank - 1], pending.sent_bytes, nbytes)
    group.barrier()
    return wrong


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_equal_plain_torch(world_size: int, kind: str) -> None:
    assert run_ranks(world_size, _check_collectives, kind) == [[]] * world_size


def _sum_numbers() -> tuple[float, list[float]]:
    """A sum that depends on the order of its terms, and sums that are waited for in the opposite order, beside an
    exchange with one partner after another."""
    group = _world()
    x = torch.tensor([1e8, 1.0, -1e8, 0.0][group.rank : group.rank + 1])
    group.all_reduce_numbers(x).wait()
    rows = torch.ones(group.size, 1 << 16)
    several = [torch.tensor([float(number + group.rank)]) for number in range(4)]
    pendings = [group.all_reduce_numbers(each) for each in several[:2]]
    pendings.append(group.all_to_all(torch.empty_like(rows), rows))
    pendings += [group.all_reduce_numbers(each) for each in several[2:]]
    for pending in reversed(pendings):
        pending.wait()
    return x.item(), [each.item() for each in several]


def test_numbers_are_added_in_the_order_of_the_ranks() -> None:
    """1e8 + 1 is 1e8 in fp32."""
    assert run_ranks(3, _sum_numbers) == [(0.0, [3.0, 6.0, 9.0, 12.0])] * 3


class _GivenToTorch(TorchDispatchMode):
    """Memory of all tensors that torch's communication was given."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            assert tensors, func
            self.memory |= {x.untyped_storage().data_ptr() for x in tensors}
        return func(*args, **(kwargs or {}))


def _check_staged() -> list[str]:
    """Starts every operation of a group on tensors that torch must not see, as it cannot send what is on a device;
    returns what is wrong: before it was waited for, nothing may have changed but on the group's side."""
    group, n = _staged_world(), dist.get_world_size()
    other, rank = (group.rank + 1) % n, group.rank
    wrong = []
    xs = [_values(r, (n, 3), torch.float32) for r in range(n)]
    sums = torch.stack(xs).sum(dim=0)

    def check(name: str, start: Any, x: torch.Tensor, out: torch.Tensor, expected: torch.Tensor) -> None:
        sent, before = x.clone(), out.clone()
        with _GivenToTorch() as calls:
            pending = start()
            if not torch.equal(out, before):
                wrong.append(f"{name}: changed before it was waited for")
            if x is not out:
                x.fill_(77.0)  # nothing of it is needed any more
            pending.wait()
        if not torch.equal(out, expected):
            wrong.append(f"{name}: {out} instead of {expected}")
        if {y.untyped_storage().data_ptr() for y in (x, out)} & calls.memory:
            wrong.append(f"{name}: torch was given the caller's memory")
        if x is not out:
            x.copy_(sent)

    x, out = xs[rank].clone(), torch.full((n, 3), -9.0)
    check("all-reduce", lambda: group.all_reduce(x), x, x, sums)
    x = xs[rank].clone()
    check("numbers", lambda: group.all_reduce_numbers(x), x, x, sums)
    x = xs[rank].clone()
    row = x[rank : rank + 1].clone()
    check("all-gather", lambda: group.all_gather(out, row), row, out, torch.stack([y[r] for r, y in enumerate(xs)]))
    scattered = torch.full((1, 3), -9.0)
    check("reduce-scatter", lambda: group.reduce_scatter(scattered, x), x, scattered, sums[rank : rank + 1])
    check("all-to-all", lambda: group.all_to_all(out, x), x, out, torch.stack([y[rank] for y in xs]))
    into, expected_rows = torch.full((n, 3), -9.0), torch.stack([y[rank] for y in xs])
    expected_rows[rank] = -9.0
    check("parts", lambda: group.all_to_all_uneven(list(into), list(x)), x, into, expected_rows)
    message = xs[rank].clone()
    check("broadcast", lambda: group.broadcast(message, 1), message, message, xs[1])
    message = xs[rank].clone()
    check("distribute", lambda: group.distribute(message), message, message, xs[0])
    rows = torch.full((n, n, 3), -9.0)
    check("collect", lambda: group.collect(rows, x), x, rows, torch.stack(xs) if rank == 0 else rows.clone())
    received = torch.full((n, 3), -9.0)
    sending: list[Any] = []

    def pass_on() -> Any:
        receive = group.recv(received, (rank - 1) % n, tag=4)
        sending.append(group.send(x, other, tag=4))
        return receive

    check("send and receive", pass_on, x, received, xs[rank - 1])
    sending[0].wait()
    group.barrier()
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_a_device_go_through_the_machines_memory(world_size: int) -> None:
    assert run_ranks(world_size, _check_staged) == [[]] * world_size


def _check_large_exchanges(kind: str) -> list[str]:
    """Several at once, large enough to exchange with a partner at a time, beside a small collective of the same
    group."""
    group = GROUPS[kind]()
    n, rank, size = group.size, group.rank, 1 << 18
    rows = [torch.stack([_values(100 * r + to, (size,), torch.float32) for to in range(n)]) for r in range(n)]
    exchanged, gathered = torch.empty(n, size), torch.empty(n * size)
    reduced, small = torch.empty(size), torch.ones(3)
    pendings = [
        group.all_to_all(exchanged, rows[rank].clone()),
        group.all_gather(gathered, rows[rank][0].clone()),
        group.all_reduce(small),
        group.reduce_scatter(reduced, rows[rank].clone().view(-1)),
    ]
    for pending in reversed(pendings):
        pending.wait()
        assert pending.done()
    wrong = []
    for name, received, expected in (
        ("exchange", exchanged, torch.stack([rows[r][rank] for r in range(n)])),
        ("all-gather", gathered, torch.cat([rows[r][0] for r in range(n)])),
        ("all-reduce", small, torch.full((3,), float(n))),
        ("reduce-scatter", reduced, torch.stack([rows[r][rank] for r in range(n)]).sum(dim=0)),
    ):
        if not torch.allclose(received, expected, rtol=1e-6, atol=1e-6):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "staged")])
def test_large_exchanges_take_a_partner_at_a_time(world_size: int, kind: str) -> None:
    assert run_ranks(world_size, _check_large_exchanges, kind) == [[]] * world_size


def _check_many_at_once() -> bool:
    """Exchanges and gathers of all sizes between two ranks, waited for in the opposite order."""
    group = _world()
    rows = [torch.full((2, size), 10.0 * group.rank + size) for size in (1, 7, 1000, 1 << 19) * 3]
    received = [torch.empty_like(x) for x in rows]
    gathered = [torch.empty(2 * x.shape[1]) for x in rows]
    pendings = [
        start
        for x, got, row in zip(rows, received, gathered, strict=True)
        for start in (group.all_to_all(got, x), group.all_gather(row, x[0].clone()))
    ]
    for pending in reversed(pendings):
        pending.wait()
    expected = [torch.tensor([x.shape[1], 10.0 + x.shape[1]]).repeat_interleave(x.shape[1]) for x in rows]
    same = [torch.equal(got.view(-1), want) for got, want in zip(received, expected, strict=True)]
    return all(same + [torch.equal(got, want) for got, want in zip(gathered, expected, strict=True)])


def test_two_ranks_exchange_many_things_at_once() -> None:
    assert run_ranks(2, _check_many_at_once) == [True] * 2


def _lose_a_peer(folder: Path) -> None:
    group = _world()
    if group.rank == 2:
        os._exit(0)
    try:
        group.all_to_all(torch.empty(3, 1 << 20), torch.ones(3, 1 << 20)).wait()
    except CommunicationError as error:
        (folder / str(group.rank)).write_text(str(error))


def test_a_partner_that_goes_in_the_middle_of_a_large_exchange_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(3, _lose_a_peer, tmp_path, timeout=60)
    messages = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert messages.keys() >= {"0"} or messages.keys() >= {"1"}
    assert all("all-to-all over world (ranks 0, 1, 2) failed" in text for text in messages.values())


def _half_precision_sum() -> float:
    """1 + 2^-8 + 2^-8 is 1 in bfloat16 when rounded after each addition."""
    group = _world()
    x = torch.full((group.size,), 1.0 if group.rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    out = torch.empty(1, dtype=torch.bfloat16)
    group.reduce_scatter(out, x).wait()
    return out.item()


def test_reduce_scatter_sums_half_precision_in_fp32() -> None:
    assert run_ranks(3, _half_precision_sum) == [1 + 2.0**-7] * 3


MEASURED_ELEMENTS = 1 << 22


def _check_topology(tp: int, pp: int, dp: int, chunks: int) -> dict[str, Any]:
    """Every group sums the ranks that it says it has."""
    topology = build_topology(Layout(tp=tp, pp=pp, dp=dp, chunks=chunks), CPU)
    facts: dict[str, Any] = {"coordinates": topology.coordinates}
    groups = {name: getattr(topology, name) for name in ("world", "control", "tp", "dp", "pp")}
    groups |= {tie.value: group for tie, group in topology.embedding.items()}
    groups |= {f"{tie.value} replicas": group for tie, group in topology.fused_embedding.items()}
    groups |= {"forward": topology.forward_link, "backward": topology.backward_link}
    for name, group in groups.items():
        x = torch.tensor([2.0**topology.rank])
        group.all_reduce(x).wait()
        assert group.ranks[group.rank] == topology.rank, name
        assert x.item() == sum(2.0**r for r in group.ranks), name
        facts[name] = group.ranks
    assert topology.mesh is not None
    facts["mesh"] = tuple(topology.mesh.get_coordinate() or ())
    return facts


def test_groups_of_a_mesh() -> None:
    layout = Layout(tp=2, pp=2, dp=1, chunks=2)
    for rank, facts in enumerate(run_ranks(4, _check_topology, 2, 2, 1, 2)):
        coordinates = layout.coordinates(rank)
        assert facts["coordinates"] == coordinates
        assert facts["mesh"] == (coordinates.pp, coordinates.dp, coordinates.tp)
        assert facts["world"] == facts["control"] == (0, 1, 2, 3)
        assert facts["tp"] == next(g for g in layout.tp_groups() if rank in g)
        assert facts["dp"] == (rank,)
        pipeline = next(g for g in layout.pp_groups() if rank in g)
        assert facts["pp"] == facts["forward"] == facts["backward"] == facts["embedding"] == pipeline
    for facts in run_ranks(4, _check_topology, 1, 2, 2, 1):
        assert len(facts["dp"]) == 2
        assert facts["tp"] == (facts["world"][facts["mesh"][0] * 2 + facts["mesh"][1]],)


def _links() -> list[bool]:
    """Messages of the same pair in different directions use different process groups."""
    topology = build_topology(Layout(pp=2, chunks=2), CPU)
    links = []
    for link in (topology.forward_link, topology.backward_link):
        assert isinstance(link, PipelineGroup)
        links.append(link.pg is not link.downwards.pg)
        peer, x, y = 1 - link.rank, torch.full((2,), float(link.rank)), torch.empty(2)
        receiving = link.recv(y, peer, tag=1)
        link.send(x, peer, tag=1).wait()
        receiving.wait()
        links.append(bool((y == peer).all()))
    return links


def test_the_two_directions_of_a_ring_use_separate_groups() -> None:
    assert run_ranks(2, _links) == [[True] * 4] * 2


def _receive_what_nobody_sends() -> str:
    """The message of the error on rank 0, over a group that the mesh made."""
    env = LaunchEnvironment.read()
    init_process_group(env, "gloo", timeout_minutes=4 / 60)
    topology = build_topology(Layout(tp=2, dp=2), CPU)
    assert isinstance(topology.control.pg, dist.ProcessGroup)
    assert topology.control.pg._get_backend(CPU).options._timeout == timedelta(seconds=4)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if env.rank == 0:
        try:
            topology.tp.recv(torch.empty(1), 1).wait()
        except CommunicationError as error:
            return str(error)
        finally:
            store.set("done", "yes")
    else:
        store.wait(["done"], timedelta(seconds=40))
    return ""


def test_every_group_has_the_runs_timeout() -> None:
    """torch's own default for groups is half an hour; this would run into the helper's limit."""
    message, *others_messages = run_ranks(4, _receive_what_nobody_sends, init=False)
    assert others_messages == [""] * 3
    assert message.startswith("receive from rank 1")
    assert "\n" not in message

"""Islands that send wrong numbers, come late or leave: rounds go on without them."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.error_feedback import RESIDUAL
from megatron.diloco import joining
from megatron.diloco.startup import QuorumError
from megatron.diloco.store import serve
from megatron.distributed.errors import CommunicationError
from tests.multiprocess.test_island_rounds import ITERATIONS, _outer
from tests.support.combinations import mark_repeats
from tests.support.island_threads import Island, build_island, in_threads, meet, train_island, train_islands


def test_a_round_that_fails_again_and_again_ends_both_islands() -> None:
    """As where a transfer takes longer than the time limit."""
    tried = [0, 0]

    def spoil(island: Island, done: int) -> None:
        sync, number = island.engines.outer, island.engines.config.islands.island or 0
        assert sync is not None

        def exchange(fragment: int) -> None:
            tried[number] += 1
            raise CommunicationError("too slow")

        sync.finish_transfer = exchange  # type: ignore[method-assign,assignment]

    with pytest.raises(QuorumError, match=r"islands 0, 1 has failed 4 times: each transfer .* 10; raise that"):
        train_islands(2, _outer("identity,every=4"), before_round=spoil)
    assert tried == [4, 4]


@pytest.mark.parametrize(("factor", "why"), [(float("nan"), "not finite"), (1e6, "times the median")])
def test_a_non_finite_or_absurd_difference_is_left_out(factor: float, why: str) -> None:
    """Its island gets the others' state after that round, or the next; in the end all have the same."""
    spoiled: list[int] = []
    anew: list[bool] = []
    counts: list[int] = []

    def spoil(island: Island, done: int) -> None:
        rounds, number = island.rounds, island.engines.config.islands.island
        assert rounds is not None
        if done == 1 and number != 2:
            rounds.progress.skipped = 3  # type: ignore[attr-defined]
        if any("joined the other islands" in line for line in island.lines) and not anew:
            anew.append(all(RESIDUAL not in state.tensors for state in rounds.sync.states()))
            counts.extend([island.engines.plan.steps.skipped, len(rounds._losses)])
        if number == 2 and done == 4 and not spoiled:
            spoiled.append(done)
            island.engines.buffers[0].params_flat[7:9] *= factor

    options = {"training": {"global_batch_size": 6, "train_iters": 20}}
    words = "fixpoint,bits=4,error-feedback=on,every=4"
    islands = train_islands(3, _outer(words, **options), 20, before_round=spoil, quorum=2)
    assert islands[0].records[0]["members"] == [0, 1]
    assert islands[0].records[-1]["members"] == [0, 1, 2]
    assert any(why in line and "island 2 is left out" in line for line in islands[1].lines)
    assert any("its steps since the last round are lost" in line for line in islands[2].lines)
    assert any("joined the other islands" in line for line in islands[2].lines)
    assert anew == [True]
    assert counts == [3, 0]  # skipped iterations, and losses of steps since the others' round
    flats = [island.engines.buffers[0].params_flat for island in islands]
    assert bool(torch.isfinite(flats[0]).all())
    assert torch.equal(flats[0], flats[2])
    assert torch.equal(flats[0], flats[1])


def test_with_two_islands_an_outlier_in_the_first_round_is_left_out() -> None:
    """Both know the initial parameters; with two islands, the mean of the others is the other island itself."""
    spoiled: list[int] = []

    def spoil(island: Island, done: int) -> None:
        if island.engines.config.islands.island == 1 and done == 4 and not spoiled:
            spoiled.append(done)
            island.engines.buffers[0].params_flat[3] = 1e30

    islands = train_islands(2, _outer("identity,every=4"), before_round=spoil, quorum=1)
    assert [record["members"] for record in islands[0].records] == [[0], [0, 1], [0, 1]]
    for island in islands:
        assert any("island 1 is left out" in line and "times that of the parameters" in line for line in island.lines)
    flats = [island.engines.buffers[0].params_flat for island in islands]
    assert float(flats[0].abs().max()) < 1e3
    assert torch.equal(*flats)


def _spoil_what_is_sent(island: Island, value: float, by: str, once: bool) -> None:
    """Makes an island send other values than the ones that its norm was computed from."""
    sync = island.engines.outer
    assert sync is not None
    send = sync.start_transfer

    def spoiled(number: int, group: Any, iteration: int) -> None:
        if once:
            sync.start_transfer = send  # type: ignore[method-assign]
        if by == "values":
            for bucket in sync.fragments[number].exchanged_buckets:
                bucket.reduced.flat[3] = value
            send(number, group, iteration)
            return
        all_reduce = group.all_reduce

        def on_the_wire(x: Tensor, *args: Any) -> Any:
            x.view(-1)[3] = value
            return all_reduce(x, *args)

        group.all_reduce = on_the_wire
        try:
            send(number, group, iteration)
        finally:
            del group.all_reduce

    sync.start_transfer = spoiled  # type: ignore[method-assign]


SPOILED = [
    pytest.param(count, by, value, id=f"{count}-{by}-{value}")
    for count, by in ((2, "values"), (3, "values"), (3, "wire"), (4, "wire"))
    for value in (float("nan"), 1e30)
]


@pytest.mark.parametrize(
    ("count", "by", "value"),
    mark_repeats(SPOILED, keep=["2-values-nan", "2-values-1e+30", "3-wire-1e+30", "4-wire-nan"]),
)
def test_an_island_with_a_false_norm_is_found_and_left_out(count: int, by: str, value: float) -> None:
    """Its norm is fine; the received values are not. The others end as they do without it in that round."""
    spoiler = 1

    def spoil(island: Island, done: int) -> None:
        if island.engines.config.islands.island == spoiler and done == 4 and len(island.losses) == 4:
            _spoil_what_is_sent(island, value, by, once=False)
        elif any("joined" in line for line in island.lines):
            island.engines.outer.__dict__.pop("start_transfer", None)

    training = {"global_batch_size": 2 * count, "train_iters": 12}
    words = "identity,every=4,outer-lr=0.5,outer-momentum=0.8"
    islands = train_islands(count, _outer(words, training=training), 12, before_round=spoil, quorum=1)
    healthy = [n for n in range(count) if n != spoiler]
    for number in healthy:
        lines = islands[number].lines
        assert any(f"island {spoiler} is left out of the round at iteration 4" in line for line in lines)
        assert not any(f"island {other} is left out" in line for other in healthy for line in lines)
        assert islands[number].records[0]["members"] == healthy
        assert islands[number].records[-1]["members"] == list(range(count))
    assert any("its steps since the last round are lost" in line for line in islands[spoiler].lines)
    flats = [island.engines.buffers[0].params_flat for island in islands]
    assert bool(torch.isfinite(flats[0]).all())
    assert float(flats[0].abs().max()) < 1e3
    assert all(torch.equal(flats[0], flat) for flat in flats)


def test_a_mean_spoiled_once_costs_no_island_anything() -> None:
    """The round is tried again with all islands, with the same result as without the fault."""

    def spoil(island: Island, done: int) -> None:
        if island.engines.config.islands.island == 1 and done == 4:
            _spoil_what_is_sent(island, float("nan"), "values", once=True)

    words = _outer("fixpoint,bits=4,error-feedback=on,every=4", training={"global_batch_size": 6})
    spoiled, healthy = train_islands(3, words, 12, before_round=spoil), train_islands(3, words, 12)
    for spoiled_island, other in zip(spoiled, healthy, strict=True):
        assert any("is tried again with all islands" in line for line in spoiled_island.lines)
        assert torch.equal(spoiled_island.engines.buffers[0].params_flat, other.engines.buffers[0].params_flat)
        assert [record["members"] for record in spoiled_island.records] == [[0, 1, 2]] * 3


def test_a_mean_spoiled_by_every_island_ends_all() -> None:
    def spoil(island: Island, done: int) -> None:
        if done == 4:
            _spoil_what_is_sent(island, float("nan"), "values", once=False)

    with pytest.raises(CommunicationError, match=r"islands 0, 1, 2 is not finite, or .* whichever island is left out"):
        train_islands(3, _outer("identity,every=4", training={"global_batch_size": 6}), 12, before_round=spoil)


WORDS = (
    "identity,every=4",
    "topk,density=0.02,error-feedback=on,every=2,outer-lr=1,outer-optimizer=plain",
    "fixpoint,bits=2,error-feedback=on,every=3,fragments=3,delay=0,mixing=0.5",
)


@pytest.mark.parametrize(
    ("words", "count"),
    mark_repeats(product(WORDS, (2, 3, 4)), keep=[(WORDS[0], 4), (WORDS[1], 2), (WORDS[1], 3), (WORDS[2], 3)]),
)
def test_healthy_islands_are_never_suspected(words: str, count: int) -> None:
    """Also where steps become a thousand times smaller and messages are mostly residual."""

    def slow_down(island: Island, done: int) -> None:
        for group in island.engines.optimizer.inner.param_groups:
            group["lr"] = 1e-6
        object.__setattr__(island.engines.config.optimizer, "lr", 1e-6 if done >= 6 else 1e-3)

    changes = _outer(words, model={"num_layers": 3}, training={"global_batch_size": 2 * count})
    for island in train_islands(count, changes, 12, before_round=slow_down):
        assert all(record["members"] == list(range(count)) for record in island.records)
        assert [line for line, values in island.reports if not values] == []


def test_an_island_without_a_loss_does_not_change_the_mean() -> None:
    """A missing loss does not count as 0, which would be a wonderful loss."""

    def lose(island: Island, done: int) -> None:
        if island.engines.config.islands.island == 1:
            island.losses[-1] = float("nan")

    pair = train_islands(2, _outer("identity,every=4"), 4, before_round=lose)
    (first,), (second,) = (island.records for island in pair)
    assert math.isnan(second["own_loss"])
    assert first["own_loss"] == first["mean_loss"] == second["mean_loss"]


def test_an_island_that_comes_after_the_end_receives_the_last_state() -> None:
    """From an island that waits for it, up to a limit; that island's log says that the other was gone."""
    store, changes = serve("127.0.0.1", 0), _outer("identity,every=4")
    at_end = threading.Event()

    def first() -> Island:
        islands = meet(store.port, 0, 2, quorum=1, seconds=2.0)
        assert islands.begin_generation(0, False, {})
        island = train_island(build_island(changes, islands, 0, 2), ITERATIONS)
        assert island.rounds is not None
        island.rounds.checkpoint_folder, island.rounds.linger_seconds = "/saved/island_0", 60.0
        at_end.set()
        began = time.monotonic()
        island.rounds.finish(ITERATIONS)
        assert time.monotonic() - began < 50
        islands.leave()
        return island

    def second() -> Island:
        early = meet(store.port, 1, 2, quorum=1)
        assert early.begin_generation(0, False, {})
        early.leave()
        assert at_end.wait(60)
        islands = meet(store.port, 1, 2, quorum=1)
        assert not islands.begin_generation(0, False, {})
        island = build_island(changes, islands, 1, 2)
        assert island.rounds is not None
        assert island.rounds.join()
        island.rounds.finish(ITERATIONS)
        islands.leave()
        return island

    pair = in_threads([first, second])
    assert pair[1].rounds.progress.iteration == ITERATIONS
    flats = [island.engines.buffers[0].params_flat for island in pair]
    assert torch.equal(*flats)
    lines = pair[0].lines
    assert sum("island 1 is gone; continuing alone" in line for line in lines) == 1
    end = "island 1 did not finish with this island at iteration 12: its state is in /saved/island_0"
    assert lines[lines.index(end) :] == [end, "waiting for island 1 to join, 60 s at most", "island 1 has joined"]


def test_an_island_that_waits_for_late_ones_ends_with_the_store() -> None:
    """Its run is saved: a line, and no error."""
    store, changes = serve("127.0.0.1", 0), _outer("identity,every=4")
    islands = [meet(store.port, number, 2, quorum=1, seconds=1.0) for number in (0, 1)]
    in_threads([partial(each.begin_generation, 0, False, {}) for each in islands])
    islands[1].leave()
    island = train_island(build_island(changes, islands[0], 0, 2), 4)
    assert island.rounds is not None
    island.rounds.checkpoint_folder, island.rounds.linger_seconds = "/saved/island_0", 60.0
    served = [store]
    del store
    threading.Timer(0.3, served.clear).start()
    began = time.monotonic()
    island.rounds.finish(4)
    assert time.monotonic() - began < 20
    islands[0].leave()
    assert island.lines[-2] == "waiting for island 1 to join, 60 s at most"
    assert island.lines[-1].startswith("late islands can no longer join: the islands' meeting place at 127.0.0")


def test_a_state_that_is_not_finite_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_JOIN_ATTEMPTS", 1)
    served, changes = [serve("127.0.0.1", 0)], _outer("identity,every=4")
    port, started = served[0].port, threading.Event()

    def first() -> None:
        islands = meet(port, 0, 2, quorum=1, seconds=0.7)
        assert islands.begin_generation(0, False, {})
        island = build_island(changes, islands, 0, 2)
        train_island(island, 4)
        started.set()
        assert island.rounds is not None
        island.rounds.sync.outer.momentum[0].view(-1)[0] = float("nan")
        # The other island builds its model meanwhile.
        island.rounds.checkpoint_folder, island.rounds.linger_seconds = "", 60.0
        island.rounds.finish(4)
        islands.leave()

    def second() -> None:
        early = meet(port, 1, 2, quorum=1)
        assert early.begin_generation(0, False, {})
        early.leave()
        assert started.wait(60)
        islands = meet(port, 1, 2, quorum=1)
        assert not islands.begin_generation(0, False, {})
        island = build_island(changes, islands, 1, 2)
        assert island.rounds is not None
        try:
            island.rounds.join()
        finally:
            served.clear()  # the first island waits no longer

    with pytest.raises(CommunicationError, match=r"joining .* has failed 1 times; the last time: .* some of it is not"):
        in_threads([first, second])

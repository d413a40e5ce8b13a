"""Rounds of islands against plain loops in double precision."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.diloco import joining
from megatron.diloco.fragments import fragment_of
from megatron.diloco.rounds import RunEnd
from megatron.diloco.startup import QuorumError
from megatron.diloco.store import serve
from megatron.distributed.errors import CommunicationError
from megatron.distributed.host_staging import StagedGroup
from megatron.distributed.round_driver import PackedReduction
from tests.support.island_threads import (
    Changes,
    Island,
    batches_of,
    build_island,
    in_threads,
    meet,
    merged,
    step,
    train_island,
    train_islands,
)
from tests.support.spawn import run_ranks

ITERATIONS = 12


def _outer(words: str, **changes: Any) -> Changes:
    return merged({"compression": {"compress": [f"outer={words},warmup=0"]}}, changes)


class _Loop:
    """Islands in one loop, whose rounds are written out here.

    Args:
        count: number of islands.
        changes: of the configuration, without the point ``outer``.
    """

    def __init__(self, count: int, changes: Changes) -> None:
        placeholder = {"compression": {"compress": ["outer=identity,warmup=1.0"]}}
        self.islands = [build_island(merged(changes, placeholder), None, n, count) for n in range(count)]
        if count == 1:
            self.islands[0].rounds = None
        self.flats = [island.engines.buffers[0].params_flat for island in self.islands]
        self.batches = [batches_of(island.engines) for island in self.islands]

    def step(self, iteration: int) -> None:
        for island, batches in zip(self.islands, self.batches, strict=True):
            island.losses.append(step(island.engines, batches, iteration))

    def mask(self, fragment: int, fragments: int) -> Tensor:
        """Where a fragment's numbers are in the flat parameters."""
        found = torch.zeros_like(self.flats[0], dtype=torch.bool)
        engines = self.islands[0].engines
        for bucket in engines.buffers[0].buckets:
            for slot in bucket.slots:
                layers = engines.config.model.num_layers
                found[slot.start : slot.stop] = fragment_of(slot.logical_name, layers, fragments) == fragment
        return found


def _assert_same(islands: list[Island], loop: _Loop, limit: float = 0.0) -> None:
    for island, flat in zip(islands, loop.flats, strict=True):
        torch.testing.assert_close(island.engines.buffers[0].params_flat, flat, rtol=limit, atol=limit)
    for island, wanted in zip(islands, loop.islands, strict=True):
        assert island.losses == pytest.approx(wanted.losses, rel=max(limit, 1e-15))


DEVICE_CASES = {
    "exact": "identity,every=4",
    "quantized": "fixpoint,bits=4,every=4",
    "sparse": "chunked-topk,every=4",
    "low rank, on its way meanwhile": "powersgd,rank=2,every=4,fragments=2,delay=1,mixing=0.5",
}


@pytest.mark.parametrize("words", DEVICE_CASES.values(), ids=DEVICE_CASES)
def test_islands_on_gpus_exchange_the_same_through_the_machines_memory(words: str) -> None:
    """Of three islands whose tensors are said to be on GPUs, all bits and all bytes are those of CPUs.

    The last step is one that lands a transfer: of one on its way any number of legs may have been sent.
    """
    changes = _outer(words, training={"global_batch_size": 6})
    plain, staged = (train_islands(3, changes, 9, device=device) for device in ("cpu", "cuda"))
    for one, other in zip(plain, staged, strict=True):
        assert type(other.rounds.islands._group) is StagedGroup  # type: ignore[union-attr]
        assert one.rounds.sync.in_flight is other.rounds.sync.in_flight is None  # type: ignore[union-attr]
        assert one.losses == other.losses
        assert torch.equal(one.engines.buffers[0].params_flat, other.engines.buffers[0].params_flat)
        sent = [island.engines.ledger.accounts[Point.OUTER].wire_bytes for island in (one, other)]
        assert sent[0] == sent[1] > 0


SGD = {"optimizer": {"optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.0, "weight_decay": 0.0}}


@pytest.mark.parametrize("changes", [{}, SGD], ids=["adam", "sgd"])
def test_every_step_exact_is_plain_averaging(changes: Changes) -> None:
    """Bit by bit what the formula gives, phi - mean(phi - theta_k); and to rounding the mean of the parameters."""
    count = 3 if changes else 2
    options = {**changes, "training": {"global_batch_size": 6 if count == 3 else 4}}
    islands = train_islands(count, _outer("identity,every=1,outer-lr=1,outer-momentum=0", **options))
    exact, plain = _Loop(count, options), _Loop(count, options)
    for iteration in range(ITERATIONS):
        anchor = exact.flats[0].clone()
        exact.step(iteration)
        plain.step(iteration)
        mean = sum(anchor - flat for flat in exact.flats) / count
        average = torch.stack(plain.flats).mean(dim=0)
        for flat in exact.flats:
            flat.copy_(anchor - mean)
        for flat in plain.flats:
            flat.copy_(average)
    _assert_same(islands, exact, 0.0 if count == 2 else 1e-12)  # three are summed in another order
    _assert_same(islands, plain, 1e-11)


@pytest.mark.parametrize(
    ("options", "settings"),
    [("outer-momentum=0.9", {"momentum": 0.9, "nesterov": True}), ("outer-optimizer=plain", {})],
    ids=["nesterov", "plain"],
)
def test_one_island_is_torchs_sgd_on_the_same_differences(options: str, settings: dict[str, Any]) -> None:
    """Lookahead, with momentum: torch.optim.SGD takes the outer steps on slow weights (as torchft's and MuLoCo's)."""
    options = f"identity,every=3,outer-lr=0.7,{options}"
    island = train_island(build_island(_outer(options), None), ITERATIONS)
    loop = _Loop(1, {})
    slow = torch.nn.Parameter(loop.flats[0].clone())
    outer = torch.optim.SGD([slow], lr=0.7, **settings)
    for iteration in range(ITERATIONS):
        loop.step(iteration)
        if (iteration + 1) % 3 == 0:
            slow.grad = slow.detach() - loop.flats[0]
            outer.step()
            loop.flats[0].copy_(slow.detach())
    _assert_same([island], loop, 1e-11)
    assert [record["iteration"] for record in island.records] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    "codec",
    [
        "fixpoint,bits=2,error-feedback=on",
        "topk,density=0.05",
        "powersgd,rank=2",
        "fixpoint,bits=2,feedback-decay=0.5,error-feedback=on",
    ],
)
def test_what_is_sent_and_what_is_left_is_what_was_meant(codec: str) -> None:
    """Over all islands: difference + residual = what the anchor moved by, times their number, + the new residual."""
    count, decay = 2, 0.5 if "decay" in codec else 1.0
    before: list[dict[str, Any]] = [{} for _ in range(count)]

    def residuals(island: Island) -> dict[str, Tensor]:
        """Residuals by parameter; zero where there is none yet."""
        found = {name: torch.zeros_like(x) for name, x in island.params.items()}
        assert island.engines.outer is not None
        for fragment in island.engines.outer.fragments:
            for spoken, units in zip(fragment.exchanged_buckets, fragment.reducer.units, strict=True):
                for unit in units:
                    if RESIDUAL not in unit.state.tensors:
                        continue
                    flat = unit.state.tensors[RESIDUAL].reshape(-1)
                    first = unit.ranges[0].start if unit.ranges else 0
                    for place in unit.ranges or spoken.reduced.ranges:
                        found[place.name] = flat[place.start - first : place.stop - first].view(place.shape).clone()
        return found

    def anchors(island: Island) -> dict[str, Tensor]:
        outer = island.engines.outer
        assert outer is not None
        pairs = zip(outer.optimizer.shards, outer.outer.outer_params, strict=True)
        return {shard.slot.logical_name: x.clone().view(shard.slot.param.shape) for shard, x in pairs}

    def look(island: Island, done: int) -> None:
        if done % 4 == 0:
            seen = {"values": island.params, "residual": residuals(island), "anchor": anchors(island)}
            before[island.engines.config.islands.island or 0][str(done)] = seen

    options = f"{codec},every=4,outer-lr=1,outer-momentum=0"
    islands = train_islands(count, _outer(options, training={"train_iters": 12}), before_round=look)
    new = [residuals(island) for island in islands]
    last = [found["12"] for found in before]
    largest = 0.0
    for name, anchor in anchors(islands[0]).items():
        meant = sum(one["anchor"][name] - one["values"][name] + decay * one["residual"][name] for one in last)
        moved = count * (last[0]["anchor"][name] - anchor)
        left = torch.stack([one[name] for one in new]).sum(dim=0)
        torch.testing.assert_close(moved + left, meant, rtol=1e-9, atol=1e-12)
        largest = max(largest, float(left.abs().max()))
    assert largest > 1e-6, "nothing was left: the codec is exact here, and the test says nothing"
    assert all(torch.equal(x, islands[1].params[name]) for name, x in islands[0].params.items())


@pytest.mark.parametrize("count", [2, 3])
def test_all_legs_of_a_transfer_are_on_their_way_while_training_goes_on(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each has the time to come, nothing is left to be sent when the fragment has to land.

    A leg's time to come is the whole step after it was sent, no less and no more, however fast this machine is.
    """
    left: list[int] = []
    may_come: set[PackedReduction] = set()
    together = threading.Barrier(count, timeout=60.0)
    arrived = PackedReduction.arrived

    def arrived_this_step(reduction: PackedReduction) -> bool:
        if reduction not in may_come:
            return False
        may_come.remove(reduction)
        return arrived(reduction)

    def look(island: Island, done: int) -> None:
        assert island.rounds is not None
        sync, in_flight = island.rounds.sync, island.rounds.sync.in_flight
        if in_flight is None:
            return
        turns = sync.fragments[in_flight.fragment].reducer._turns
        together.wait()
        last = time.monotonic() + 30.0
        for pending in turns:
            assert pending.reduction is not None
            while not arrived(pending.reduction):
                assert time.monotonic() < last, "what every island has sent has not come, or nobody tells"
                time.sleep(0.01)
            may_come.add(pending.reduction)
        together.wait()
        if done == in_flight.sent + 3:
            left.append(len(turns))

    monkeypatch.setattr(PackedReduction, "arrived", arrived_this_step)
    changes = _outer("fixpoint,bits=4,every=4,delay=3,mixing=0.5", training={"global_batch_size": 12})
    train_islands(count, changes, before_round=look)
    assert left == [0] * (2 * count)


def _rounds_by_hand(loop: _Loop, fragments: int, every: int, delay: int, mixing: float, lr: float, mu: float) -> None:
    """The whole schedule, written out: fragments in turn, applied after a delay, mixed; all together at the end."""
    masks = [loop.mask(number, fragments) for number in range(fragments)]
    anchor, momentum = loop.flats[0].clone(), torch.zeros_like(loop.flats[0])
    waiting: dict[int, tuple[int, Tensor]] = {}

    def mean() -> Tensor:
        return sum(anchor - flat for flat in loop.flats) / len(loop.flats)  # type: ignore[return-value]

    def apply(fragment: int, difference: Tensor, share: float) -> None:
        at = masks[fragment]
        momentum[at] = mu * momentum[at] + difference[at]
        anchor[at] -= lr * (difference[at] + mu * momentum[at])
        for flat in loop.flats:
            flat[at] = share * flat[at] + (1 - share) * anchor[at]

    for iteration in range(ITERATIONS):
        loop.step(iteration)
        done = iteration + 1
        due = min(done, ITERATIONS)
        for fragment, difference in [waiting.pop(at) for at in list(waiting) if at <= due or done == ITERATIONS]:
            apply(fragment, difference, mixing)
        if done == ITERATIONS:
            for fragment in range(fragments):
                apply(fragment, mean(), 0.0)
        elif done % (every // fragments) == 0:
            fragment = (done // (every // fragments) - 1) % fragments
            if delay:
                waiting[done + delay] = fragment, mean()
            else:
                apply(fragment, mean(), mixing)


@pytest.mark.parametrize(("fragments", "delay", "mixing"), [(2, 0, 0.0), (2, 1, 0.0), (1, 3, 0.5), (2, 1, 0.25)])
def test_fragments_delay_and_mixing_are_what_a_plain_loop_does(fragments: int, delay: int, mixing: float) -> None:
    words = f"identity,every=4,outer-lr=0.5,outer-momentum=0.8,fragments={fragments},delay={delay},mixing={mixing}"
    training = {"training": {"train_iters": ITERATIONS}}
    islands = train_islands(2, _outer(words, **training))
    loop = _Loop(2, training)
    _rounds_by_hand(loop, fragments, 4, delay, mixing, 0.5, 0.8)
    _assert_same(islands, loop, 1e-11)
    assert torch.equal(*(island.engines.buffers[0].params_flat for island in islands))
    hidden = [record["hidden"] for record in islands[0].records if "hidden" in record]
    assert (len(hidden) > 0) == (delay > 0)
    assert all(0.0 <= share <= 1.0 for share in hidden)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor x pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "pipeline x sharded replicas": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "sequence-parallel, interleaved": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "replicas": {},
}
SIZES = {"model": {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2}}
WORDS = "every=3,outer-lr=0.7,outer-momentum=0.9,fragments=3,delay=0,mixing=0.25"


def _layouts(codecs: list[tuple[str, str]]) -> list[list[float]]:
    """Losses of one island on this world's ranks."""
    found = []
    for layout, codec in codecs:
        changes = merged(SIZES, _outer(f"{codec},{WORDS}"), {"parallel": LAYOUTS[layout]})
        found.append(train_island(build_island(changes, None), ITERATIONS).losses)
    return found


def test_an_island_is_the_same_on_any_layout() -> None:
    """Losses of an island of four ranks are those of one process; compressors see whole parameters where replicas
    share the optimizer out."""
    layouts = [("powersgd,rank=2" if name == "replicas" else "identity", name) for name in LAYOUTS]
    runs = [(name, codec) for codec, name in layouts]
    one = train_island(build_island(merged(SIZES, _outer(f"identity,{WORDS}")), None), ITERATIONS).losses
    whole = train_island(build_island(merged(SIZES, _outer(f"powersgd,rank=2,{WORDS}")), None), ITERATIONS).losses
    assert one != pytest.approx(whole, rel=1e-6), "the codec changes nothing, and the test says nothing of it"
    for losses in run_ranks(4, _layouts, runs):
        for (name, codec), found in zip(runs, losses, strict=True):
            wanted = one if codec == "identity" else whole
            assert found == pytest.approx(wanted, rel=1e-10), name


def test_an_anchor_in_the_cpus_memory_changes_nothing() -> None:
    words = "identity,every=4,outer-lr=0.5,outer-momentum=0.8"
    found = [train_island(build_island(_outer(f"{words},offload={on}"), None), ITERATIONS) for on in ("on", "off")]
    assert torch.equal(*(island.engines.buffers[0].params_flat for island in found))


EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["none"],
}


def test_the_biases_of_experts_are_the_mean_of_the_islands_after_each_round() -> None:
    """No gradient moves them, so they are no part of the differences; islands end with the same."""
    before: dict[int, list[Tensor]] = {}

    def biases(island: Island) -> list[Tensor]:
        return [x.clone() for name, x in island.engines.stages[0].named_buffers() if name.endswith("expert_bias")]

    def look(island: Island, done: int) -> None:
        if done == ITERATIONS:
            before[island.engines.config.islands.island or 0] = biases(island)

    islands = train_islands(2, _outer("fixpoint,bits=4,every=4", model=EXPERTS), before_round=look)
    assert any(not torch.equal(x, y) for x, y in zip(before[0], before[1], strict=True))
    for ends in map(biases, islands):
        for end, x, y in zip(ends, before[0], before[1], strict=True):
            torch.testing.assert_close(end, (x + y) / 2, rtol=0, atol=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(*map(biases, islands), strict=True))


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
def test_a_difference_that_is_not_finite_or_absurd_is_left_out(factor: float, why: str) -> None:
    """Its island gets the others' state after that round, or the next; in the end all have the same."""
    spoiled: list[int] = []
    anew: list[bool] = []
    taken: list[int] = []

    def spoil(island: Island, done: int) -> None:
        rounds, number = island.rounds, island.engines.config.islands.island
        assert rounds is not None
        if done == 1 and number != 2:
            rounds.progress.skipped = 3  # type: ignore[attr-defined]
        if any("joined the other islands" in line for line, _ in island.told) and not anew:
            anew.append(all(RESIDUAL not in state.tensors for state in rounds.sync.states()))
            taken.extend([island.engines.plan.steps.skipped, len(rounds._losses)])
        if number == 2 and done == 4 and not spoiled:
            spoiled.append(done)
            island.engines.buffers[0].params_flat[7:9] *= factor

    options = {"training": {"global_batch_size": 6, "train_iters": 20}}
    words = "fixpoint,bits=4,error-feedback=on,every=4"
    islands = train_islands(3, _outer(words, **options), 20, before_round=spoil, quorum=2)
    assert islands[0].records[0]["members"] == [0, 1]
    assert islands[0].records[-1]["members"] == [0, 1, 2]
    assert any(why in line and "island 2 is left out" in line for line, _ in islands[1].told)
    assert any("its steps since the last round are lost" in line for line, _ in islands[2].told)
    assert any("joined the other islands" in line for line, _ in islands[2].told)
    assert anew == [True]
    assert taken == [3, 0]  # skipped iterations, and losses of steps since the others' round
    flats = [island.engines.buffers[0].params_flat for island in islands]
    assert bool(torch.isfinite(flats[0]).all())
    assert torch.equal(flats[0], flats[2])
    assert torch.equal(flats[0], flats[1])


def test_of_two_islands_one_that_is_far_off_in_the_first_round_is_left_out() -> None:
    """Both know the parameters that they began with; the other one's mean is its own."""
    spoiled: list[int] = []

    def spoil(island: Island, done: int) -> None:
        if island.engines.config.islands.island == 1 and done == 4 and not spoiled:
            spoiled.append(done)
            island.engines.buffers[0].params_flat[3] = 1e30

    islands = train_islands(2, _outer("identity,every=4"), before_round=spoil, quorum=1)
    assert [record["members"] for record in islands[0].records] == [[0], [0, 1], [0, 1]]
    for island in islands:
        assert any("island 1 is left out" in line and "times that of the parameters" in line for line, _ in island.told)
    flats = [island.engines.buffers[0].params_flat for island in islands]
    assert float(flats[0].abs().max()) < 1e3
    assert torch.equal(*flats)


def _spoil_what_is_sent(island: Island, value: float, by: str, once: bool) -> None:
    """Makes an island send something else than what its norm was measured of."""
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

        def on_the_wire(x: Tensor, *rest: Any) -> Any:
            x.view(-1)[3] = value
            return all_reduce(x, *rest)

        group.all_reduce = on_the_wire
        try:
            send(number, group, iteration)
        finally:
            del group.all_reduce

    sync.start_transfer = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [float("nan"), 1e30])
@pytest.mark.parametrize(("count", "by"), [(2, "values"), (3, "values"), (3, "wire"), (4, "wire")])
def test_an_island_that_sends_something_else_than_it_says_is_found_and_left_out(
    count: int, by: str, value: float
) -> None:
    """Its norm is fine; what the others receive is not. They end with what they come to without it in that round."""
    spoiler = 1

    def spoil(island: Island, done: int) -> None:
        if island.engines.config.islands.island == spoiler and done == 4 and len(island.losses) == 4:
            _spoil_what_is_sent(island, value, by, once=False)
        elif any("joined" in line for line, _ in island.told):
            island.engines.outer.__dict__.pop("start_transfer", None)

    training = {"global_batch_size": 2 * count, "train_iters": 12}
    words = "identity,every=4,outer-lr=0.5,outer-momentum=0.8"
    islands = train_islands(count, _outer(words, training=training), 12, before_round=spoil, quorum=1)
    others = [n for n in range(count) if n != spoiler]
    for number in others:
        lines = [line for line, _ in islands[number].told]
        assert any(f"island {spoiler} is left out of the round at iteration 4" in line for line in lines)
        assert not any(f"island {other} is left out" in line for other in others for line in lines)
        assert islands[number].records[0]["members"] == others
        assert islands[number].records[-1]["members"] == list(range(count))
    assert any("its steps since the last round are lost" in line for line, _ in islands[spoiler].told)
    flats = [island.engines.buffers[0].params_flat for island in islands]
    assert bool(torch.isfinite(flats[0]).all())
    assert float(flats[0].abs().max()) < 1e3
    assert all(torch.equal(flats[0], flat) for flat in flats)


def test_what_spoils_a_mean_once_costs_no_island_anything() -> None:
    """The round is tried again with all of them, and is what it would have been."""

    def spoil(island: Island, done: int) -> None:
        if island.engines.config.islands.island == 1 and done == 4:
            _spoil_what_is_sent(island, float("nan"), "values", once=True)

    words = _outer("fixpoint,bits=4,error-feedback=on,every=4", training={"global_batch_size": 6})
    spoiled, healthy = train_islands(3, words, 12, before_round=spoil), train_islands(3, words, 12)
    for one, other in zip(spoiled, healthy, strict=True):
        assert any("is tried again with all islands" in line for line, _ in one.told)
        assert torch.equal(one.engines.buffers[0].params_flat, other.engines.buffers[0].params_flat)
        assert [record["members"] for record in one.records] == [[0, 1, 2]] * 3


def test_a_mean_that_is_spoiled_whoever_is_left_out_ends_all() -> None:
    def spoil(island: Island, done: int) -> None:
        if done == 4:
            _spoil_what_is_sent(island, float("nan"), "values", once=False)

    with pytest.raises(CommunicationError, match=r"islands 0, 1, 2 is not finite, or .* whichever island is left out"):
        train_islands(3, _outer("identity,every=4", training={"global_batch_size": 6}), 12, before_round=spoil)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "words",
    [
        "identity,every=4",
        "topk,density=0.02,error-feedback=on,every=2,outer-lr=1,outer-optimizer=plain",
        "fixpoint,bits=2,error-feedback=on,every=3,fragments=3,delay=0,mixing=0.5",
    ],
)
def test_healthy_islands_are_never_suspected(count: int, words: str) -> None:
    """Also where steps become a thousand times smaller and a residual is most of what is sent."""

    def slow_down(island: Island, done: int) -> None:
        for group in island.engines.optimizer.inner.param_groups:
            group["lr"] = 1e-6
        object.__setattr__(island.engines.config.optimizer, "lr", 1e-6 if done >= 6 else 1e-3)

    changes = _outer(words, model={"num_layers": 3}, training={"global_batch_size": 2 * count})
    for island in train_islands(count, changes, 12, before_round=slow_down):
        assert all(record["members"] == list(range(count)) for record in island.records)
        assert [line for line, values in island.told if not values] == []


def test_an_island_without_a_loss_says_so_and_leaves_the_mean_as_it_is() -> None:
    """Not 0, which would be a wonderful loss."""

    def lose(island: Island, done: int) -> None:
        if island.engines.config.islands.island == 1:
            island.losses[-1] = float("nan")

    pair = train_islands(2, _outer("identity,every=4"), 4, before_round=lose)
    (first,), (second,) = (island.records for island in pair)
    assert math.isnan(second["own_loss"])
    assert first["own_loss"] == first["mean_loss"] == second["mean_loss"]


def test_an_island_that_comes_after_the_end_is_sent_the_last_state() -> None:
    """By one that stays for it, for as long as it is told to; the other one's log says that it was gone."""
    store, changes = serve("127.0.0.1", 0), _outer("identity,every=4")
    at_end = threading.Event()

    def first() -> Island:
        islands = meet(store.port, 0, 2, quorum=1, seconds=2.0)
        assert islands.begin_generation(0, False, {})
        island = train_island(build_island(changes, islands, 0, 2), ITERATIONS)
        assert island.rounds is not None
        island.rounds.end = RunEnd("/saved/island_0", 60.0)
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
    lines = [line for line, _ in pair[0].told]
    assert sum("island 1 is gone, going on alone" in line for line in lines) == 1
    end = "island 1 did not come to the end, iteration 12, with this one: its state is in /saved/island_0"
    assert lines[lines.index(end) :] == [end, "waiting for island 1 to join, 60 s at most", "island 1 has joined"]


def test_an_island_that_stays_for_late_ones_ends_when_the_meeting_place_does() -> None:
    """Its run is saved: one line, and no error."""
    store, changes = serve("127.0.0.1", 0), _outer("identity,every=4")
    islands = [meet(store.port, number, 2, quorum=1, seconds=1.0) for number in (0, 1)]
    in_threads([partial(each.begin_generation, 0, False, {}) for each in islands])
    islands[1].leave()
    island = train_island(build_island(changes, islands[0], 0, 2), 4)
    assert island.rounds is not None
    island.rounds.end = RunEnd("/saved/island_0", 60.0)
    served = [store]
    del store
    threading.Timer(1.0, served.clear).start()
    began = time.monotonic()
    island.rounds.finish(4)
    assert time.monotonic() - began < 20
    islands[0].leave()
    assert island.told[-2][0] == "waiting for island 1 to join, 60 s at most"
    assert island.told[-1][0].startswith("nothing more is done for late islands: the islands' meeting place at 127.0.0")


def test_a_state_that_is_not_finite_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MOST_JOINS", 1)
    store, changes = serve("127.0.0.1", 0), _outer("identity,every=4")
    begun = threading.Event()

    def first() -> None:
        islands = meet(store.port, 0, 2, quorum=1, seconds=2.0)
        assert islands.begin_generation(0, False, {})
        island = build_island(changes, islands, 0, 2)
        begun.set()
        train_island(island, 4)
        assert island.rounds is not None
        island.rounds.sync.outer.momentum[0].view(-1)[0] = float("nan")
        island.rounds.end = RunEnd("", 10.0)  # the other one builds its model meanwhile
        island.rounds.finish(4)
        islands.leave()

    def second() -> None:
        early = meet(store.port, 1, 2, quorum=1)
        assert early.begin_generation(0, False, {})
        early.leave()
        assert begun.wait(60)
        time.sleep(3.0)
        islands = meet(store.port, 1, 2, quorum=1)
        assert not islands.begin_generation(0, False, {})
        island = build_island(changes, islands, 1, 2)
        assert island.rounds is not None
        island.rounds.join()

    with pytest.raises(CommunicationError, match=r"joining .* has failed 1 times; the last time: .* some of it is not"):
        in_threads([first, second])

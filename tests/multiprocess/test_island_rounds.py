"""Rounds of islands against plain loops in double precision."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.diloco.fragments import fragment_index
from megatron.distributed.host_staging import StagedGroup
from megatron.distributed.round_driver import PackedReduction
from tests.support.combinations import mark_repeats
from tests.support.island_threads import Changes, Island, batches_of, build_island, step, train_island, train_islands
from tests.support.spawn import run_ranks
from tests.support.tiny import merge

ITERATIONS = 12


def _outer(words: str, **changes: Any) -> Changes:
    return merge({"compression": {"compress": [f"outer={words},warmup=0"]}}, changes)


class _Loop:
    """Islands in a loop, with rounds written out here.

    Args:
        count: number of islands.
        changes: of the configuration, without the point ``outer``.
    """

    def __init__(self, count: int, changes: Changes) -> None:
        placeholder = {"compression": {"compress": ["outer=identity,warmup=1.0"]}}
        self.islands = [build_island(merge(changes, placeholder), None, n, count) for n in range(count)]
        if count == 1:
            self.islands[0].rounds = None
        self.flats = [island.engines.buffers[0].params_flat for island in self.islands]
        self.batches = [batches_of(island.engines) for island in self.islands]

    def step(self, iteration: int) -> None:
        for island, batches in zip(self.islands, self.batches, strict=True):
            island.losses.append(step(island.engines, batches, iteration))

    def mask(self, fragment: int, fragments: int) -> Tensor:
        """Where a fragment's numbers are in the flat parameters."""
        mask = torch.zeros_like(self.flats[0], dtype=torch.bool)
        engines = self.islands[0].engines
        for bucket in engines.buffers[0].buckets:
            for slot in bucket.slots:
                layers = engines.config.model.num_layers
                mask[slot.start : slot.stop] = fragment_index(slot.logical_name, layers, fragments) == fragment
        return mask


def _assert_same(islands: list[Island], loop: _Loop, limit: float = 0.0) -> None:
    for island, flat in zip(islands, loop.flats, strict=True):
        torch.testing.assert_close(island.engines.buffers[0].params_flat, flat, rtol=limit, atol=limit)
    for island, reference in zip(islands, loop.islands, strict=True):
        assert island.losses == pytest.approx(reference.losses, rel=max(limit, 1e-15))


DEVICE_CASES = {
    "exact": "identity,every=4",
    "quantized": "fixpoint,bits=4,every=4",
    "sparse": "chunked-topk,every=4",
    "low rank, on its way meanwhile": "powersgd,rank=2,every=4,fragments=2,delay=1,mixing=0.5",
}


@pytest.mark.parametrize("name", mark_repeats(DEVICE_CASES, keep=["quantized", "low rank, on its way meanwhile"]))
def test_islands_on_gpus_exchange_the_same_through_the_machines_memory(name: str) -> None:
    """Three islands with tensors declared as on GPUs have the same bits and bytes as on CPUs.

    The last step lands a transfer: a transfer in flight may have sent any number of legs.
    """
    changes = _outer(DEVICE_CASES[name], training={"global_batch_size": 6})
    plain, staged = (train_islands(3, changes, 9, device=device) for device in ("cpu", "cuda"))
    for plain_island, other in zip(plain, staged, strict=True):
        assert type(other.rounds.islands._group) is StagedGroup  # type: ignore[union-attr]
        assert plain_island.rounds.sync.in_flight is other.rounds.sync.in_flight is None  # type: ignore[union-attr]
        assert plain_island.losses == other.losses
        assert torch.equal(plain_island.engines.buffers[0].params_flat, other.engines.buffers[0].params_flat)
        sent = [island.engines.ledger.accounts[Point.OUTER].wire_bytes for island in (plain_island, other)]
        assert sent[0] == sent[1] > 0


SGD = {"optimizer": {"optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.0, "weight_decay": 0.0}}


@pytest.mark.parametrize("changes", [{}, SGD], ids=["adam", "sgd"])
def test_every_step_exact_is_plain_averaging(changes: Changes) -> None:
    """Bit by bit the formula phi - mean(phi - theta_k); and to rounding the mean of the parameters."""
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
def test_messages_and_residuals_add_up_to_the_differences(codec: str) -> None:
    """Over all islands: difference + residual = movement of the anchor, times the number of islands, + the new
    residual."""
    count, decay = 2, 0.5 if "decay" in codec else 1.0
    before: list[dict[str, Any]] = [{} for _ in range(count)]

    def residuals(island: Island) -> dict[str, Tensor]:
        """Residuals by parameter; zero where there is none yet."""
        by_name = {name: torch.zeros_like(x) for name, x in island.params.items()}
        assert island.engines.outer is not None
        for fragment in island.engines.outer.fragments:
            for spoken, units in zip(fragment.exchanged_buckets, fragment.reducer.units, strict=True):
                for unit in units:
                    if RESIDUAL not in unit.state.tensors:
                        continue
                    flat = unit.state.tensors[RESIDUAL].reshape(-1)
                    first = unit.ranges[0].start if unit.ranges else 0
                    for slot in unit.ranges or spoken.reduced.ranges:
                        by_name[slot.name] = flat[slot.start - first : slot.stop - first].view(slot.shape).clone()
        return by_name

    def anchors(island: Island) -> dict[str, Tensor]:
        outer = island.engines.outer
        assert outer is not None
        pairs = zip(outer.optimizer.shards, outer.outer.outer_params, strict=True)
        return {shard.slot.logical_name: x.clone().view(shard.slot.param.shape) for shard, x in pairs}

    def look(island: Island, done: int) -> None:
        if done % 4 == 0:
            snapshot = {"values": island.params, "residual": residuals(island), "anchor": anchors(island)}
            before[island.engines.config.islands.island or 0][str(done)] = snapshot

    options = f"{codec},every=4,outer-lr=1,outer-momentum=0"
    islands = train_islands(count, _outer(options, training={"train_iters": 12}), before_round=look)
    new = [residuals(island) for island in islands]
    last = [snapshots["12"] for snapshots in before]
    largest = 0.0
    for name, anchor in anchors(islands[0]).items():
        expected = sum(x["anchor"][name] - x["values"][name] + decay * x["residual"][name] for x in last)
        moved = count * (last[0]["anchor"][name] - anchor)
        residual = torch.stack([residual_of[name] for residual_of in new]).sum(dim=0)
        torch.testing.assert_close(moved + residual, expected, rtol=1e-9, atol=1e-12)
        largest = max(largest, float(residual.abs().max()))
    assert largest > 1e-6, "nothing was left: the codec is exact here, and the test says nothing"
    assert all(torch.equal(x, islands[1].params[name]) for name, x in islands[0].params.items())


@pytest.mark.parametrize("count", [2, 3])
def test_all_legs_of_a_transfer_are_sent_while_training_goes_on(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each has the time to come, nothing is left to be sent when the fragment has to land.

    A leg's time to come is the whole step after it was sent, no less and no more, however fast this machine is.
    """
    unsent: list[int] = []
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
            unsent.append(len(turns))

    monkeypatch.setattr(PackedReduction, "arrived", arrived_this_step)
    changes = _outer("fixpoint,bits=4,every=4,delay=3,mixing=0.5", training={"global_batch_size": 12})
    train_islands(count, changes, before_round=look)
    assert unsent == [0] * (2 * count)


def _rounds_by_hand(loop: _Loop, fragments: int, every: int, delay: int, mixing: float, lr: float, mu: float) -> None:
    """The whole schedule, written out: fragments in turn, applied after a delay, mixed; all together at the end."""
    masks = [loop.mask(number, fragments) for number in range(fragments)]
    anchor, momentum = loop.flats[0].clone(), torch.zeros_like(loop.flats[0])
    in_flight: dict[int, tuple[int, Tensor]] = {}

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
        for fragment, difference in [in_flight.pop(at) for at in list(in_flight) if at <= done or done == ITERATIONS]:
            apply(fragment, difference, mixing)
        if done == ITERATIONS:
            for fragment in range(fragments):
                apply(fragment, mean(), 0.0)
        elif done % (every // fragments) == 0:
            fragment = (done // (every // fragments) - 1) % fragments
            if delay:
                in_flight[done + delay] = fragment, mean()
            else:
                apply(fragment, mean(), mixing)


LATE = [(2, 0, 0.0), (2, 1, 0.0), (1, 3, 0.5), (2, 1, 0.25)]


@pytest.mark.parametrize(("fragments", "delay", "mixing"), mark_repeats(LATE, keep=[(2, 0, 0.0), (2, 1, 0.25)]))
def test_fragments_delay_and_mixing_equal_a_plain_loop(fragments: int, delay: int, mixing: float) -> None:
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


def _losses_of(codec: str, layout: dict[str, Any]) -> list[float]:
    """Losses of an island on this world's ranks."""
    changes = merge(SIZES, _outer(f"{codec},{WORDS}"), {"parallel": layout})
    return train_island(build_island(changes, None), ITERATIONS).losses


# Interleaved stages are tensor-parallel and stages, too.
@pytest.mark.parametrize("name", mark_repeats(LAYOUTS, keep=LAYOUTS.keys() - {"tensor x pipeline"}))
def test_an_island_is_the_same_on_any_layout(name: str) -> None:
    """Losses of an island of four ranks are those of a single process; compressors see whole parameters where replicas
    share the optimizer out."""
    codec = "powersgd,rank=2" if name == "replicas" else "identity"
    expected = _losses_of(codec, {})
    if codec != "identity":
        exact = _losses_of("identity", {})
        assert exact != pytest.approx(expected, rel=1e-6), "the codec changes nothing, and the test says nothing of it"
    for losses in run_ranks(4, _losses_of, codec, LAYOUTS[name]):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_an_anchor_in_the_cpus_memory_changes_nothing() -> None:
    words = "identity,every=4,outer-lr=0.5,outer-momentum=0.8"
    pair = [train_island(build_island(_outer(f"{words},offload={on}"), None), ITERATIONS) for on in ("on", "off")]
    assert torch.equal(*(island.engines.buffers[0].params_flat for island in pair))


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

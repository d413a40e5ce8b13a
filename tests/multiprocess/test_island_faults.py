"""Islands that are killed in any phase of a round: the others go on, and the averages are right."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.diloco.membership import Islands
from megatron.diloco.round_decision import RoundOutcome
from megatron.diloco.store import serve
from tests.support.cleanup import die_with_parent
from tests.support.combinations import mark_repeats
from tests.support.island_threads import Changes, Island, batches_of, build_island, meet, step, train_island
from tests.support.spawn import context_of_tests
from tests.support.tiny import merge

pytestmark = pytest.mark.multiprocess

EVERY, ITERATIONS, DEATH = 4, 16, 8
SECONDS = 2.0
OUTER: dict[str, dict[str, Any]] = {
    "compression": {"compress": [f"outer=identity,every={EVERY},outer-lr=0.9,outer-momentum=0.5,warmup=0"]},
    "training": {"train_iters": ITERATIONS},
}
MUON = {"optimizer": {"optimizer": "muon"}}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies(island: Island, islands: Islands, phase: str) -> None:
    """Arranges that this process is killed in a phase of the round after ``DEATH`` iterations."""
    rounds = island.rounds
    assert rounds is not None
    last_round = f"{DEATH}/0/0"
    arrive, settle, exchange, put, apply = (
        islands.report_to_round,
        islands.decide_outcome,
        rounds.sync.finish_transfer,
        islands.store.put,
        rounds.sync.apply_mean,
    )
    at: dict[str, str] = {"key": ""}

    def arriving(key: str, *args: Any) -> Any:
        at["key"] = key
        decision = arrive(key, *args)
        if (phase, key) == ("arrived", last_round):
            _kill()
        return decision

    def exchanging(number: int) -> None:
        if (phase, at["key"]) == ("exchange", last_round):
            time.sleep(0.3)  # the others wait for it
            _kill()
        exchange(number)

    def putting(key: str, value: Any) -> None:
        put(key, value)
        if phase == "voted" and key == f"{last_round}/ok/1":
            _kill()

    def settling(key: str, *args: Any) -> RoundOutcome:
        outcome = settle(key, *args)
        if (phase, key) == ("settled", last_round):
            _kill()
        return outcome

    def applying(number: int, alpha: float) -> None:
        apply(number, alpha)
        if (phase, at["key"]) == ("applied", last_round):
            _kill()

    islands.report_to_round, islands.decide_outcome, islands.store.put = arriving, settling, putting  # type: ignore[method-assign,assignment]
    rounds.sync.finish_transfer, rounds.sync.apply_mean = exchanging, applying  # type: ignore[method-assign]


def _run(port: int, number: int, out: str, phase: str, changes: Changes) -> None:
    """The process of an island; the first waits in the round after the death for the other to come back."""
    die_with_parent()
    torch.set_num_threads(1)
    islands = meet(port, number, 2, quorum=1, seconds=SECONDS)
    begins = islands.begin_generation(0, False, {})
    island = build_island(merge(OUTER, changes), islands, number, 2)
    if phase:
        _dies(island, islands, phase)

    def pause(island: Island, done: int) -> None:
        if phase == "step" and done == DEATH - 1:
            _kill()
        deadline = time.monotonic() + 60
        while number == 0 and done == DEATH + 2 and not islands.store.get("joining/1") and time.monotonic() < deadline:
            time.sleep(0.02)

    first = 0
    if not begins:
        assert island.rounds is not None
        assert island.rounds.join()
        first = island.rounds.progress.iteration  # type: ignore[attr-defined]
    train_island(island, ITERATIONS, first, pause)
    islands.leave()
    flat = island.engines.buffers[0].params_flat
    Path(out).write_bytes(pickle.dumps((island.reports, island.losses, flat)))


def _reference(records: list[dict[str, Any]], changes: Changes) -> tuple[torch.Tensor, list[float]]:
    """Island 0 as it should be when each round averages its members exactly once: a loop without communication.

    Island 1 goes on from the round before its next one, with the anchor and the inner optimizer of island 0.
    """
    plain = merge(OUTER, changes, {"compression": {"compress": ["outer=identity,warmup=1.0"]}})
    pair = [build_island(plain, None, number, 2) for number in (0, 1)]
    flats = [island.engines.buffers[0].params_flat for island in pair]
    members = {record["iteration"]: record["members"] for record in records}
    anchor, momentum, losses = flats[0].clone(), torch.zeros_like(flats[0]), []
    for done in range(EVERY, ITERATIONS + 1, EVERY):
        for number in members[done]:
            batches = batches_of(pair[number].engines, done - EVERY)
            step_losses = [step(pair[number].engines, batches, iteration) for iteration in range(done - EVERY, done)]
            losses += step_losses if number == 0 else []
        mean = sum(anchor - flats[number] for number in members[done]) / len(members[done])
        momentum = 0.5 * momentum + mean
        anchor = anchor - 0.9 * (mean + 0.5 * momentum)
        for flat in flats:
            flat.copy_(anchor)
        if 1 not in members[done]:
            inner = [island.engines.optimizer.inner for island in pair]
            inner[1].load_state_dict(copy.deepcopy(inner[0].state_dict()))
    return flats[0], losses


PHASES = ("step", "arrived", "exchange", "voted", "settled", "applied")
KILLED: dict[str, tuple[str, Changes]] = {**{phase: (phase, {}) for phase in PHASES}, "step of Muon": ("step", MUON)}


# The others see a death outside the round, in its exchange, among the votes, and when the round already counts.
@pytest.mark.parametrize("name", mark_repeats(KILLED, keep=["step of Muon", "exchange", "voted", "settled"]))
def test_a_killed_island_leaves_the_other_and_comes_back(tmp_path: Path, name: str) -> None:
    phase, changes = KILLED[name]
    store, context = serve("127.0.0.1", 0), context_of_tests()

    def start(number: int, phase: str) -> Any:
        process = context.Process(
            target=_run, args=(store.port, number, str(tmp_path / str(number)), phase, changes), daemon=True
        )
        process.start()
        return process

    processes = [start(0, ""), start(1, phase)]
    try:
        processes[1].join(60)
        assert processes[1].exitcode == -signal.SIGKILL
        processes.append(start(1, ""))
        for process in (processes[0], processes[2]):
            process.join(90)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    (reports, losses, flat), (back, _, other) = (pickle.loads((tmp_path / str(n)).read_bytes()) for n in (0, 1))
    records = [values for _, values in reports if values]
    members = [record["members"] for record in records]
    # Once it has reported its part as done, the round counts; the next round is without it.
    counted = phase in ("settled", "applied")
    if phase != "voted":
        assert members[1] == ([0, 1] if counted else [0])
    assert members[0] == members[3] == [0, 1]
    assert [record["iteration"] for record in records] == [4, 8, 12, 16]
    assert any("has joined" in line for line, _ in reports)
    assert any("joined the other islands" in line for line, _ in back)
    assert torch.equal(flat, other)
    expected, wanted_losses = _reference(records, changes)
    torch.testing.assert_close(flat, expected, rtol=1e-10, atol=1e-10)
    assert losses == pytest.approx(wanted_losses, rel=1e-10)
    all_of_them = [{"iteration": n, "members": [0, 1]} for n in range(EVERY, ITERATIONS + 1, EVERY)]
    undisturbed, usual = _reference(all_of_them, changes)
    assert not torch.equal(undisturbed, flat)
    assert losses[-1] < usual[-1] * 1.05

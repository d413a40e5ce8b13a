"""Islands that are lost, signaled or cannot begin: all end together."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.test_islands import LOCAL
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags
from tests.support.islands import SCRIPT, IslandProcesses, events, run_islands
from tests.support.train import train

pytestmark = pytest.mark.multiprocess


def _reached(path: Path, iteration: int, running: IslandProcesses, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or max((e["iteration"] for e in events(path)), default=0) < iteration:
        assert time.monotonic() < deadline, running.islands[0].output(0).text()
        time.sleep(0.05)


@pytest.mark.parametrize("phase", ["in step", "in rounds", "without a place to meet"])
def test_a_lost_island_ends_the_others_in_one_line_where_they_need_it(prefix: Path, tmp_path: Path, phase: str) -> None:
    """While they go in step they need all, and later the quorum (all of them, unless told otherwise), and a place to
    meet in."""
    spec = "outer=identity,every=20,warmup=" + ("1.0" if phase == "in step" else "0")
    flags = {"train_iters": 100_000, "save": tmp_path / "saved", "islands_timeout_seconds": 2, "compress": [spec]}
    log = tmp_path / "log.jsonl"
    with IslandProcesses(2, 1, tiny_flags(prefix, **flags, log_json_file=log)) as running:
        _reached(tmp_path / "log.island_0.jsonl", 25, running)
        if phase == "without a place to meet":
            del running._store
        else:
            running.islands[1].kill()
        began = time.monotonic()
        (result,) = running.islands[0].wait(60)
        assert time.monotonic() - began < 25
    assert result.returncode == 3
    (line,) = [line for line in result.stderr.splitlines() if "rank 0: " in line]
    if phase == "in step":
        assert "an island is gone while they go in step" in line
        return
    if phase != "in rounds":
        assert "the islands' meeting place at 127.0.0.1:" in line
        return
    assert "1 of 2 islands came to a round within 2 s, and --islands-quorum is 2" in line
    saved = int((tmp_path / "saved" / "island_0" / "latest_checkpointed_iteration.txt").read_text())
    assert saved % 20 == 0


def test_a_signal_to_an_island_ends_all_with_matching_checkpoints(prefix: Path, tmp_path: Path) -> None:
    """At the end of a round, while each takes steps of its own."""
    flags = {"train_iters": 100_000, "save": tmp_path / "saved", "compress": ["outer=identity,every=7,warmup=0"]}
    log = tmp_path / "log.jsonl"
    words = tiny_flags(prefix, **flags, log_json_file=log, exit_signal_handler=True)
    with IslandProcesses(2, 1, words) as running:
        _reached(tmp_path / "log.island_1.jsonl", 10, running)
        running.islands[1].kill(number=signal.SIGTERM)
        results = running.wait(60)
    for (result,) in results:
        assert "a termination signal" in result.check().stdout
    trackers = [tmp_path / "saved" / f"island_{n}" / "latest_checkpointed_iteration.txt" for n in (0, 1)]
    saved = {int(tracker.read_text()) for tracker in trackers}
    assert len(saved) == 1
    assert saved.pop() % 7 == 0


def test_unusable_checkpoints_end_all_islands_in_one_line(prefix: Path, tmp_path: Path) -> None:
    """Checkpoints between two rounds without the islands' common state; and a damaged checkpoint of an island."""
    flags = {**LOCAL, "save": tmp_path / "saved", "compress": ["outer=identity,every=3,warmup=2"]}
    run_islands(2, 1, tiny_flags(prefix, **flags, exit_interval=4))

    def refusals(**changes: object) -> list[str]:
        words = tiny_flags(prefix, **{**flags, "load": tmp_path / "saved", **changes})
        with IslandProcesses(2, 1, words) as running:
            results = [result for (result,) in running.wait(60)]
        assert [result.returncode for result in results] == [2, 2]
        assert all(len(result.stderr.strip().splitlines()) == 1 for result in results)
        return [result.stderr for result in results]

    for line in refusals(no_load_optim=True):
        assert "islands 0 and 1 begin at iteration 4 with different weights" in line
    for line in refusals(compress=["outer=identity,every=3,warmup=5"]):
        assert "with warmup=5 (a third of the run, unless it is written) they would go in step again" in line
        assert "write warmup=4 or less" in line
    shard = next((tmp_path / "saved" / "island_1" / "iter_0000004").glob("shard_*.bin"))
    shard.write_bytes(shard.read_bytes()[:-100])
    first, second = refusals()
    assert second.partition("error: ")[2] in first.replace("island 1: ", "")
    assert "error: island 1: " in first


def test_islands_without_the_others_kernels_are_refused(prefix: Path, tmp_path: Path) -> None:
    """Each moves its own anchor, and kernels and pure torch differ in the last digit."""
    words = tiny_flags(prefix, train_iters=3, compress=["outer=identity,every=1,warmup=0"])
    with IslandProcesses(2, 1, words, {1: {"MEGATRON_CC_KERNELS": "reference"}}) as running:
        results = [result for (result,) in running.wait(60)]
    for result in results:
        assert result.returncode == 2
        assert "islands 0 and 1 do not agree: kernels is compiled and none" in result.stderr


def test_a_fragment_in_flight_needs_the_same_number_of_fragments(prefix: Path, tmp_path: Path) -> None:
    flags = {**LOCAL, "save": tmp_path / "saved"}
    spec = "outer=identity,every=4,fragments={},delay=1,warmup=0"
    train(1, tiny_flags(prefix, **flags, compress=[spec.format(2)], exit_interval=2))
    result = run_cli(1, [SCRIPT, *tiny_flags(prefix, **flags, compress=[spec.format(1)], load=tmp_path / "saved")])
    assert result.returncode == 2
    assert "a fragment was on its way at its iteration, one of fragments=2" in result.stderr

"""Islands: worlds of their own that train one model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cleanup import descendants, kill_tree
from tests.support.cli import REPO, CliResult, _environment, run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.islands import SCRIPT, IslandProcesses, events, losses, run_islands, saved_tensors
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

FP64: dict[str, Any] = {"fp64": True, "train_iters": 6, "global_batch_size": 4, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("data") / "tiny")


def _close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], limit: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, x in one.items():
        torch.testing.assert_close(x, other[name], rtol=limit, atol=limit, msg=name)


LAYOUTS: dict[str, dict[str, Any]] = {
    "a process": {},
    "sharded replicas": {"use_distributed_optimizer": True},
    "replicas": {},
    "stages": {"pipeline_model_parallel_size": 2},
    "a process, batches by a schedule": {
        "train_iters": None,
        "train_samples": 32,
        "global_batch_size": None,
        "step_batch_size_schedule": "0:2,64:6,224:8",  # 2, 2, 6, 6, 8, 8
    },
    "a process, batches and sequences that grow": {
        "train_iters": None,
        "train_samples": 20,
        "rampup_batch_size": "2 2 4",  # 2, 2, 4, 4, 4, 4
        "curriculum_learning": True,
        "curriculum_seqlen_min": 8,
        "curriculum_seqlen_step": 4,
        "curriculum_seqlen_steps": 4,
    },
}


@pytest.mark.parametrize(
    ("layout", "by"),
    [*((layout, "exact") for layout in LAYOUTS), ("sharded replicas", "compressed"), ("replicas", "compressed")],
)
def test_islands_in_step_are_data_parallelism(prefix: Path, tmp_path: Path, layout: str, by: str) -> None:
    """Two islands, of one rank or of two, against one world of all replicas."""
    ranks = 1 if layout.startswith("a process") else 2
    flags = {**FP64, **LAYOUTS[layout], "seq_length": 16}
    whole = tmp_path / "whole"
    train(2 * ranks, tiny_flags(prefix, **flags, save=whole, log_json_file=tmp_path / "whole.jsonl"))
    together = tiny_flags(
        prefix,
        **flags,
        save=tmp_path / "islands",
        log_json_file=tmp_path / "log.jsonl",
        compress=[f"outer=identity,in-step={by},every=1,warmup=1.0"],
    )
    run_islands(2, ranks, together)
    for island in (0, 1):
        found = losses(tmp_path / f"log.island_{island}.jsonl")
        assert len(found) == 6
        assert found == pytest.approx(losses(tmp_path / "whole.jsonl"), rel=1e-10, abs=1e-10)
        numbers = sum(x.numel() for x in saved_tensors(whole, 6, "model.").values())
        for event in events(tmp_path / f"log.island_{island}.jsonl"):
            # 2 (K - 1) / K times the gradients, once for all replicas and for both holders of the embedding; buckets
            # that are shared out may be padded.
            sent = event["comm"]["outer"]["wire_bytes"]
            assert numbers * 8 <= sent <= numbers * 8 + 64 * (ranks - 1)
        _close(saved_tensors(tmp_path / "islands" / f"island_{island}", 6), saved_tensors(whole, 6))


IN_STEP = {
    "fixpoint": "fixpoint,bits=2,error-feedback=on",
    "powersgd": "powersgd,rank=2",
    "identity": "identity",
}


@pytest.mark.parametrize(
    ("codec", "precision"), [("fixpoint", "fp64"), ("powersgd", "fp64"), ("identity", "fp64"), ("fixpoint", "fp16")]
)
def test_compressed_sums_in_step_are_those_of_compressed_data_parallelism(
    prefix: Path, tmp_path: Path, codec: str, precision: str
) -> None:
    """The same compressor sums the same gradients over two replicas, and over two islands of one rank. The residual
    has no loss scale, which grows, and nothing of a step that overflows."""
    flags = {**FP64, "seq_length": 16}
    if precision == "fp16":
        flags |= {"fp64": False, "fp16": True, "initial_loss_scale": 2.0**19, "loss_scale_window": 2, "hysteresis": 1}
    spec = IN_STEP[codec]
    train(2, tiny_flags(prefix, **flags, log_json_file=tmp_path / "whole.jsonl", compress=[f"dp-grad={spec}"]))
    outer = f"outer={spec},in-step=compressed,every=1,warmup=1.0"
    run_islands(2, 1, tiny_flags(prefix, **flags, log_json_file=tmp_path / "log.jsonl", compress=[outer]))
    whole = losses(tmp_path / "whole.jsonl")
    for island in (0, 1):
        assert losses(tmp_path / f"log.island_{island}.jsonl") == pytest.approx(whole, rel=1e-10, abs=1e-10)
        found, among_replicas = (
            [event for event in events(tmp_path / name) if not event["skipped_iterations"]]
            for name in (f"log.island_{island}.jsonl", "whole.jsonl")
        )
        assert (len(found) < flags["train_iters"]) == (precision == "fp16")
        for own, both in zip(found, among_replicas, strict=True):
            assert 2 * own["comm"]["outer"]["wire_bytes"] == both["comm"]["dp-grad"]["wire_bytes"]


LOCAL: dict[str, Any] = {**FP64, "train_iters": 9, "save_interval": 100, "optimizer": "adam"}
SPECS = {
    "residual": "outer=fixpoint,bits=2,error-feedback=on,every=3,warmup=2",
    "on its way": "outer=powersgd,rank=2,every=4,fragments=2,delay=1,mixing=0.5,warmup=0",
    "in step": "outer=fixpoint,bits=2,error-feedback=on,in-step=compressed,every=3,warmup=5",
}


@pytest.mark.parametrize("name", SPECS)
def test_resume_in_the_middle_of_a_round_is_exact(prefix: Path, tmp_path: Path, name: str) -> None:
    """Stopped between two rounds, while a fragment is on its way, and in step, with residuals; two islands of two
    replicas."""
    stop = 6 if name == "on its way" else 4
    flags = {**LOCAL, "use_distributed_optimizer": True, "compress": [SPECS[name]]}
    run_islands(2, 2, tiny_flags(prefix, **flags, save=tmp_path / "whole", log_json_file=tmp_path / "whole.jsonl"))
    parts = {**flags, "save": tmp_path / "parts", "log_json_file": tmp_path / "parts.jsonl"}
    run_islands(2, 2, tiny_flags(prefix, **parts, exit_interval=stop))
    common = json.loads((tmp_path / "parts" / "island_0" / f"iter_{stop:07d}" / "common.json").read_text())
    assert (common["outer"]["flight"] is not None) == (name == "on its way")
    run_islands(2, 2, tiny_flags(prefix, **parts, load=tmp_path / "parts"))
    for island in (0, 1):
        whole, found = (tmp_path / f"{which}.island_{island}.jsonl" for which in ("whole", "parts"))
        assert losses(found) == losses(whole)
        rounds = [[(e["iteration"], e["norm"]) for e in events(path, "outer")] for path in (whole, found)]
        assert rounds[0] == rounds[1]
        if name == "residual":
            _check_traffic(whole)
        saved = [saved_tensors(tmp_path / which / f"island_{island}", 9) for which in ("whole", "parts")]
        _close(saved[0], saved[1], 0.0)
    weights = [saved_tensors(tmp_path / "whole" / f"island_{island}", 9, "model.") for island in (0, 1)]
    _close(weights[0], weights[1], 0.0)


def test_islands_go_on_by_the_same_command_after_one_was_killed_before_it_saved(prefix: Path, tmp_path: Path) -> None:
    """From the newest checkpoint that both have, to the bit; the other's newer ones are replaced."""
    spec, root, log = "outer=fixpoint,bits=4,error-feedback=on,every=3,warmup=2", tmp_path / "saved", tmp_path / "log"
    flags = {**LOCAL, "save_interval": 4, "save": root, "load": root, "compress": [spec], "log_json_file": log}
    run_islands(2, 1, tiny_flags(prefix, **flags))
    wanted = [saved_tensors(root / f"island_{island}", 9) for island in (0, 1)]
    for lost in (8, 9):
        shutil.rmtree(root / "island_0" / f"iter_{lost:07d}")
    (root / "island_0" / "latest_checkpointed_iteration.txt").write_text("4\n")
    results = run_islands(2, 1, tiny_flags(prefix, **flags))
    assert "that enough islands have is of iteration 4; this one has 9, too" in results[1][0].stdout
    for island in (0, 1):
        found = [(event["iteration"], event["lm_loss"]) for event in events(tmp_path / f"log.island_{island}")]
        assert len(found) == 14
        assert found[9:] == found[4:9]
        _close(saved_tensors(root / f"island_{island}", 9), wanted[island], 0.0)


LOST_AT_FIRST = {
    "in step": (1, "outer=identity,every=3,warmup=1.0", {}),
    "in rounds": (1, "outer=fixpoint,bits=4,every=3,warmup=0", {}),
    "in rounds, two ranks": (2, "outer=identity,every=3,warmup=0", {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("case", LOST_AT_FIRST)
def test_islands_go_on_by_the_same_command_after_one_was_killed_before_its_first_save(
    prefix: Path, tmp_path: Path, case: str
) -> None:
    """All are needed. The others' newest checkpoint is sent to it, which in step is all that it has lost."""
    ranks, spec, changes = LOST_AT_FIRST[case]
    root, log = tmp_path / "saved", tmp_path / "log"
    flags = {**LOCAL, **changes, "save_interval": 4, "save": root, "load": root, "compress": [spec]}
    run_islands(2, ranks, tiny_flags(prefix, **flags))
    whole = saved_tensors(root / "island_0", 9)
    shutil.rmtree(root / "island_0")
    for lost in (8, 9):
        shutil.rmtree(root / "island_1" / f"iter_{lost:07d}")
    (root / "island_1" / "latest_checkpointed_iteration.txt").write_text("4\n")
    results = run_islands(2, ranks, tiny_flags(prefix, **flags, log_json_file=log))
    said = "".join(result.stdout for result in results[0])
    assert "joined the other islands at iteration 4, with the state of island 1" in said
    for island in (0, 1):
        assert [event["iteration"] for event in events(tmp_path / f"log.island_{island}")] == [5, 6, 7, 8, 9]
    ends = [saved_tensors(root / f"island_{island}", 9, "model.") for island in (0, 1)]
    _close(ends[0], ends[1], 0.0)
    if case == "in step":
        _close(saved_tensors(root / "island_0", 9), whole, 0.0)


def test_an_island_that_has_only_newer_checkpoints_than_a_quorum_is_sent_theirs(prefix: Path, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    flags = {**LOCAL, "global_batch_size": 6, "save_interval": 4, "save": root, "load": root, "islands_quorum": 2}
    words = tiny_flags(prefix, **flags, compress=["outer=identity,every=3,warmup=2"])
    run_islands(3, 1, words)
    for island, kept in ((0, 8), (1, 4), (2, 4)):
        for lost in {4, 8, 9} - {kept}:
            shutil.rmtree(root / f"island_{island}" / f"iter_{lost:07d}")
        (root / f"island_{island}" / "latest_checkpointed_iteration.txt").write_text(f"{kept}\n")
    results = run_islands(3, 1, words)
    assert "that enough islands have is of iteration 4; this one has 8, and is sent" in results[0][0].stdout
    assert "joined the other islands at iteration 4, with the state of island 1" in results[0][0].stdout
    ends = [saved_tensors(root / f"island_{island}", 9, "model.") for island in range(3)]
    for end in ends[1:]:
        _close(ends[0], end, 0.0)


def _reached(path: Path, iteration: int, running: IslandProcesses, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or max((e["iteration"] for e in events(path)), default=0) < iteration:
        assert time.monotonic() < deadline, running.islands[0].output(0).text()
        time.sleep(0.05)


@pytest.mark.parametrize("phase", ["in step", "in rounds", "without a place to meet"])
def test_an_island_that_is_lost_ends_the_others_in_one_line_where_they_need_it(
    prefix: Path, tmp_path: Path, phase: str
) -> None:
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


def test_a_signal_to_one_island_ends_all_of_them_with_checkpoints_that_go_together(
    prefix: Path, tmp_path: Path
) -> None:
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


def test_what_islands_cannot_begin_with_ends_all_of_them_in_one_line(prefix: Path, tmp_path: Path) -> None:
    """Checkpoints between two rounds, without what holds the islands together; one island's that is damaged."""
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
    """Each moves its own anchor, which kernels and pure torch do not do alike to the last digit."""
    words = tiny_flags(prefix, train_iters=3, compress=["outer=identity,every=1,warmup=0"])
    with IslandProcesses(2, 1, words, {1: {"MEGATRON_CC_KERNELS": "reference"}}) as running:
        results = [result for (result,) in running.wait(60)]
    for result in results:
        assert result.returncode == 2
        assert "islands 0 and 1 do not agree: kernels is compiled and none" in result.stderr


def test_a_fragment_on_its_way_needs_as_many_fragments(prefix: Path, tmp_path: Path) -> None:
    flags = {**LOCAL, "save": tmp_path / "saved"}
    spec = "outer=identity,every=4,fragments={},delay=1,warmup=0"
    train(1, tiny_flags(prefix, **flags, compress=[spec.format(2)], exit_interval=2))
    result = run_cli(1, [SCRIPT, *tiny_flags(prefix, **flags, compress=[spec.format(1)], load=tmp_path / "saved")])
    assert result.returncode == 2
    assert "a fragment was on its way at its iteration, one of fragments=2" in result.stderr


def test_the_launcher_starts_islands_and_one_that_is_killed_comes_back(prefix: Path, tmp_path: Path) -> None:
    """Both islands end at the same weights, though one was killed in between; the launcher's status is 0."""
    spec = "outer=fixpoint,bits=4,every=20,warmup=0"
    changes: dict[str, Any] = {"train_iters": 120, "save": tmp_path / "saved", "compress": [spec]}
    flags = tiny_flags(prefix, **changes, islands_quorum=1, log_json_file=tmp_path / "log.jsonl")
    words = ["tools/launch.py", "--islands", "2", "--nproc-per-node", "2", "--max-restarts", "1", SCRIPT, *flags]
    output = tmp_path / "output"
    with output.open("w") as out:
        launcher = subprocess.Popen([sys.executable, *words], cwd=REPO, env=_environment(None), stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 90
        while not (ranks := _ranks(launcher.pid)).keys() >= {0, 1} or not _done(tmp_path, 25):
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        os.kill(ranks[0], signal.SIGSTOP)  # so that the run does not end before the other one is back
        os.kill(ranks[1], signal.SIGKILL)
        while output.read_text().count("model:\n") < 3:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        os.kill(ranks[0], signal.SIGCONT)
        assert launcher.wait(90) == 0, output.read_text()
    finally:
        kill_tree(launcher.pid)
    said = output.read_text()
    assert "island 1 has joined" in said
    assert "joined the other islands at iteration" in said
    weights = [saved_tensors(tmp_path / "saved" / f"island_{island}", 120, "model.") for island in (0, 1)]
    _close(weights[0], weights[1], 0.0)


def _done(folder: Path, iteration: int) -> bool:
    paths = [folder / f"log.island_{island}.jsonl" for island in (0, 1)]
    return all(path.exists() and max((e["iteration"] for e in events(path)), default=0) >= iteration for path in paths)


def _ranks(launcher: int) -> dict[int, int]:
    """Process ids of the islands' ranks, by island."""
    found = {}
    for pid in descendants(launcher):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if b"RANK" in variables and b"MEGATRON_ISLAND" in variables:
                found[int(variables[b"MEGATRON_ISLAND"])] = pid
    return found


def _check_traffic(log: Path) -> None:
    """Nothing crosses between rounds, and little in them."""
    sent = {event["iteration"]: event["comm"].get("outer", {}).get("wire_bytes", 0) for event in events(log)}
    exact = sent[1]
    assert exact == sent[2] > 0
    for iteration in range(3, 10):
        rounds = iteration in (5, 8, 9)
        assert (0 < sent[iteration] < exact / 8) if rounds else not sent[iteration], iteration


def test_the_anchor_goes_to_another_layout(prefix: Path, tmp_path: Path) -> None:
    """One island stops between two rounds as one process, and goes on as two stages of two replicas."""
    spec = "outer=identity,every=3,outer-lr=0.5,outer-momentum=0.8,warmup=0"
    flags: dict[str, Any] = {**FP64, "compress": [spec]}
    train(1, tiny_flags(prefix, **flags, log_json_file=tmp_path / "whole.jsonl"))
    parts = {**flags, "save": tmp_path / "saved", "log_json_file": tmp_path / "parts.jsonl"}
    train(1, tiny_flags(prefix, **parts, exit_interval=4))
    layout = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "load": tmp_path / "saved"}
    train(4, tiny_flags(prefix, **parts, **layout))
    assert losses(tmp_path / "parts.jsonl") == pytest.approx(losses(tmp_path / "whole.jsonl"), rel=1e-10)


RESIDUALS = "compressor.outer."


def _mean_residuals(folders: list[Path], iteration: int) -> dict[str, torch.Tensor]:
    """Means over islands of what their compressors have left."""
    found = [saved_tensors(folder, iteration, RESIDUALS) for folder in folders]
    return {
        name: torch.stack([one[name] for one in found]).mean(dim=0) for name in found[0] if name.endswith("residual")
    }


@pytest.mark.parametrize("now", [1, 3])
def test_another_number_of_islands_goes_on_from_the_end_of_a_round(prefix: Path, tmp_path: Path, now: int) -> None:
    """The anchor and the mean of the residuals are as they were; between two rounds it is refused in one line."""
    spec = "outer=fixpoint,bits=2,error-feedback=on,every=3,warmup=0"
    flags: dict[str, Any] = {**FP64, "global_batch_size": 6, "compress": [spec], "save": tmp_path / "two"}
    run_islands(2, 1, tiny_flags(prefix, **flags, exit_interval=4, save_interval=3))
    before = _mean_residuals([tmp_path / "two" / f"island_{n}" for n in (0, 1)], 3)
    assert max(float(x.abs().max()) for x in before.values()) > 1e-6

    def go_on(step: int, **more: Any) -> list[list[CliResult]]:
        changed = {**flags, "load": tmp_path / "two", "save": tmp_path / "then", "ckpt_step": step, **more}
        if now == 1:  # a folder of one run; its only island has rounds, too
            changed["load"] = tmp_path / "two" / "island_0"
            return [[run_cli(1, [SCRIPT, *tiny_flags(prefix, **changed)])]]
        with IslandProcesses(now, 1, tiny_flags(prefix, **changed)) as running:
            return running.wait()

    for (result,) in go_on(4):
        assert result.returncode == 2
        assert "were under way to a round at iteration 4" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    for (result,) in go_on(3, save_interval=4):
        result.check()
    folders = [tmp_path / "then" / f"island_{n}" for n in range(now)] if now > 1 else [tmp_path / "then"]
    _close(_mean_residuals(folders, 4), before, 1e-14)
    anchors = [saved_tensors(root, 4, "optimizer.outer_anchor") for root in (folders[0], tmp_path / "two" / "island_1")]
    _close(anchors[0], anchors[1], 0.0)
    weights = [saved_tensors(folder, 6, "model.") for folder in folders]
    for other in weights[1:]:
        _close(weights[0], other, 0.0)


def test_residuals_of_gradients_end_with_the_steps_in_step(prefix: Path, tmp_path: Path) -> None:
    """They are none of differences; what a compressor knows besides (factors) serves these, too."""
    spec = "outer=powersgd,rank=2,in-step=compressed,every=2,warmup=2"
    run_islands(2, 1, tiny_flags(prefix, **FP64, compress=[spec], save=tmp_path / "saved", save_interval=1))
    kept = [saved_tensors(tmp_path / "saved" / "island_0", done, "compressor.") for done in (2, 3, 4)]
    residuals = [{name for name, x in one.items() if name.endswith("residual") and x.any()} for one in kept]
    assert residuals[0]
    assert not residuals[1]
    assert residuals[2] == residuals[0]
    factors = [{name: x for name, x in one.items() if not name.endswith("residual")} for one in kept]
    assert factors[0]
    _close(factors[0], factors[1], 0.0)


ROUNDS = "outer=identity,every=2,outer-lr=0.5,outer-momentum=0.8,warmup=1"
SUMS = "outer=cast,in-step=compressed,every=2,outer-lr=0.5,outer-momentum=0.8,warmup=3"


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(ROUNDS, {"pipeline_model_parallel_size": 2}), (SUMS, {"pipeline_model_parallel_size": 2}), (ROUNDS, {})],
    ids=["rounds of stages", "in step of stages", "rounds of replicas"],
)
def test_two_islands_of_two_ranks_are_two_islands_of_one_process(
    prefix: Path, tmp_path: Path, spec: str, layout: dict[str, Any]
) -> None:
    """Replicas have the samples of the one process. The embedding that both stages hold crosses once, and both get what
    the islands have made of it."""
    found = {}
    for ranks in (1, 2):
        log = tmp_path / f"{ranks}.jsonl"
        changes = {**FP64, **(layout if ranks == 2 else {}), "compress": [spec], "log_json_file": log}
        run_islands(2, ranks, tiny_flags(prefix, **changes))
        logs = [tmp_path / f"{ranks}.island_{island}.jsonl" for island in (0, 1)]
        found[ranks] = [losses(path) for path in logs]
        sent = [event["comm"]["outer"]["wire_bytes"] for event in events(logs[0]) if event["iteration"] == 3]
        found[ranks].append(sent)
    assert found[1][0] != found[1][1]
    for one, two in zip(found[1], found[2], strict=True):
        assert two == pytest.approx(one, rel=1e-10)

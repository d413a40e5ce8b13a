"""Islands: separate worlds that train a model together."""

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
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.islands import SCRIPT, IslandProcesses, events, losses, run_islands, saved_tensors
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

FP64: dict[str, Any] = {"fp64": True, "train_iters": 6, "global_batch_size": 4, "micro_batch_size": 1}


def _close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    assert actual
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=limit, atol=limit, msg=name)


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


SUMMED = [*((layout, "exact") for layout in LAYOUTS), ("sharded replicas", "compressed"), ("replicas", "compressed")]
# A process is what batches by a schedule and sequences that grow have, too.
KEPT = [pair for pair in SUMMED if pair[0] not in ("a process", "replicas", "sharded replicas")]
KEPT += [("sharded replicas", "exact"), ("replicas", "compressed")]


@pytest.mark.parametrize(("layout", "by"), mark_repeats(SUMMED, KEPT))
def test_islands_in_step_are_data_parallelism(prefix: Path, tmp_path: Path, layout: str, by: str) -> None:
    """Two islands, of a rank or two each, against a single world of all replicas."""
    ranks = 1 if layout.startswith("a process") else 2
    flags = {**FP64, **LAYOUTS[layout], "seq_length": 16}
    whole_run = tmp_path / "whole"
    train(2 * ranks, tiny_flags(prefix, **flags, save=whole_run, log_json_file=tmp_path / "whole.jsonl"))
    together = tiny_flags(
        prefix,
        **flags,
        save=tmp_path / "islands",
        log_json_file=tmp_path / "log.jsonl",
        compress=[f"outer=identity,in-step={by},every=1,warmup=1.0"],
    )
    run_islands(2, ranks, together)
    for island in (0, 1):
        island_losses = losses(tmp_path / f"log.island_{island}.jsonl")
        assert len(island_losses) == 6
        assert island_losses == pytest.approx(losses(tmp_path / "whole.jsonl"), rel=1e-10, abs=1e-10)
        numbers = sum(x.numel() for x in saved_tensors(whole_run, 6, "model.").values())
        for event in events(tmp_path / f"log.island_{island}.jsonl"):
            # 2 (K - 1) / K times the gradients, once for all replicas and for both holders of the embedding; buckets
            # that are shared out may be padded.
            sent = event["comm"]["outer"]["wire_bytes"]
            assert numbers * 8 <= sent <= numbers * 8 + 64 * (ranks - 1)
        _close(saved_tensors(tmp_path / "islands" / f"island_{island}", 6), saved_tensors(whole_run, 6))


IN_STEP = {
    "fixpoint": "fixpoint,bits=2,error-feedback=on",
    "powersgd": "powersgd,rank=2",
    "identity": "identity",
}


PRECISIONS = [("fixpoint", "fp64"), ("powersgd", "fp64"), ("identity", "fp64"), ("fixpoint", "fp16")]


@pytest.mark.parametrize(
    ("codec", "precision"), mark_repeats(PRECISIONS, keep=[("powersgd", "fp64"), ("fixpoint", "fp16")])
)
def test_islands_in_step_with_compressors_are_compressed_data_parallelism(
    prefix: Path, tmp_path: Path, codec: str, precision: str
) -> None:
    """The same compressor sums the same gradients over two replicas, and over two islands of a rank each. The residual
    has no loss scale, which grows, and nothing of a step that overflows."""
    flags = {**FP64, "seq_length": 16}
    if precision == "fp16":
        flags |= {"fp64": False, "fp16": True, "initial_loss_scale": 2.0**19, "loss_scale_window": 2, "hysteresis": 1}
    spec = IN_STEP[codec]
    train(2, tiny_flags(prefix, **flags, log_json_file=tmp_path / "whole.jsonl", compress=[f"dp-grad={spec}"]))
    outer = f"outer={spec},in-step=compressed,every=1,warmup=1.0"
    run_islands(2, 1, tiny_flags(prefix, **flags, log_json_file=tmp_path / "log.jsonl", compress=[outer]))
    whole_losses = losses(tmp_path / "whole.jsonl")
    for island in (0, 1):
        assert losses(tmp_path / f"log.island_{island}.jsonl") == pytest.approx(whole_losses, rel=1e-10, abs=1e-10)
        island_steps, replica_steps = (
            [event for event in events(tmp_path / name) if not event["skipped_iterations"]]
            for name in (f"log.island_{island}.jsonl", "whole.jsonl")
        )
        assert (len(island_steps) < flags["train_iters"]) == (precision == "fp16")
        for ours, theirs in zip(island_steps, replica_steps, strict=True):
            assert 2 * ours["comm"]["outer"]["wire_bytes"] == theirs["comm"]["dp-grad"]["wire_bytes"]


LOCAL: dict[str, Any] = {**FP64, "train_iters": 9, "save_interval": 100, "optimizer": "adam"}
SPECS = {
    "residual": "outer=fixpoint,bits=2,error-feedback=on,every=3,warmup=2",
    "on its way": "outer=powersgd,rank=2,every=4,fragments=2,delay=1,mixing=0.5,warmup=0",
    "in step": "outer=fixpoint,bits=2,error-feedback=on,in-step=compressed,every=3,warmup=5",
}


# That residuals of gradients in step are saved, and only those, is also another test's.
@pytest.mark.parametrize("name", mark_repeats(SPECS, keep=["residual", "on its way"]))
def test_resume_in_the_middle_of_a_round_is_exact(prefix: Path, tmp_path: Path, name: str) -> None:
    """Stopped between two rounds, while a fragment is on its way, and in step, with residuals; two islands of two
    replicas."""
    stop = 6 if name == "on its way" else 4
    flags = {**LOCAL, "use_distributed_optimizer": True, "compress": [SPECS[name]]}
    run_islands(2, 2, tiny_flags(prefix, **flags, save=tmp_path / "whole", log_json_file=tmp_path / "whole.jsonl"))
    resumed = {**flags, "save": tmp_path / "parts", "log_json_file": tmp_path / "parts.jsonl"}
    run_islands(2, 2, tiny_flags(prefix, **resumed, exit_interval=stop))
    common = json.loads((tmp_path / "parts" / "island_0" / f"iter_{stop:07d}" / "common.json").read_text())
    assert (common["outer"]["flight"] is not None) == (name == "on its way")
    run_islands(2, 2, tiny_flags(prefix, **resumed, load=tmp_path / "parts"))
    for island in (0, 1):
        whole_log, resumed_log = (tmp_path / f"{stem}.island_{island}.jsonl" for stem in ("whole", "parts"))
        assert losses(resumed_log) == losses(whole_log)
        rounds = [[(e["iteration"], e["norm"]) for e in events(path, "outer")] for path in (whole_log, resumed_log)]
        assert rounds[0] == rounds[1]
        if name == "residual":
            _check_traffic(whole_log)
        saved = [saved_tensors(tmp_path / stem / f"island_{island}", 9) for stem in ("whole", "parts")]
        _close(saved[0], saved[1], 0.0)
    weights = [saved_tensors(tmp_path / "whole" / f"island_{island}", 9, "model.") for island in (0, 1)]
    _close(weights[0], weights[1], 0.0)


def test_islands_resume_by_the_same_command_after_a_kill_before_a_save(prefix: Path, tmp_path: Path) -> None:
    """From the newest checkpoint that both have, to the bit; the other's newer checkpoints are replaced."""
    spec, root, log = "outer=fixpoint,bits=4,error-feedback=on,every=3,warmup=2", tmp_path / "saved", tmp_path / "log"
    flags = {**LOCAL, "save_interval": 4, "save": root, "load": root, "compress": [spec], "log_json_file": log}
    run_islands(2, 1, tiny_flags(prefix, **flags))
    expected = [saved_tensors(root / f"island_{island}", 9) for island in (0, 1)]
    for lost in (8, 9):
        shutil.rmtree(root / "island_0" / f"iter_{lost:07d}")
    (root / "island_0" / "latest_checkpointed_iteration.txt").write_text("4\n")
    results = run_islands(2, 1, tiny_flags(prefix, **flags))
    assert "that enough islands have is of iteration 4; this one has 9, too" in results[1][0].stdout
    for island in (0, 1):
        logged = [(event["iteration"], event["lm_loss"]) for event in events(tmp_path / f"log.island_{island}")]
        assert len(logged) == 14
        assert logged[9:] == logged[4:9]
        _close(saved_tensors(root / f"island_{island}", 9), expected[island], 0.0)


LOST_AT_FIRST = {
    "in step": (1, "outer=identity,every=3,warmup=1.0", {}),
    "in rounds": (1, "outer=fixpoint,bits=4,every=3,warmup=0", {}),
    "in rounds, two ranks": (2, "outer=identity,every=3,warmup=0", {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("case", mark_repeats(LOST_AT_FIRST, keep=["in step", "in rounds, two ranks"]))
def test_islands_resume_by_the_same_command_after_a_kill_before_the_first_save(
    prefix: Path, tmp_path: Path, case: str
) -> None:
    """All are needed. It receives the others' newest checkpoint, and in step it has lost nothing else."""
    ranks, spec, changes = LOST_AT_FIRST[case]
    root, log = tmp_path / "saved", tmp_path / "log"
    flags = {**LOCAL, **changes, "save_interval": 4, "save": root, "load": root, "compress": [spec]}
    run_islands(2, ranks, tiny_flags(prefix, **flags))
    expected = saved_tensors(root / "island_0", 9)
    shutil.rmtree(root / "island_0")
    for lost in (8, 9):
        shutil.rmtree(root / "island_1" / f"iter_{lost:07d}")
    (root / "island_1" / "latest_checkpointed_iteration.txt").write_text("4\n")
    results = run_islands(2, ranks, tiny_flags(prefix, **flags, log_json_file=log))
    output_text = "".join(result.stdout for result in results[0])
    assert "joined the other islands at iteration 4, with the state of island 1" in output_text
    for island in (0, 1):
        assert [event["iteration"] for event in events(tmp_path / f"log.island_{island}")] == [5, 6, 7, 8, 9]
    ends = [saved_tensors(root / f"island_{island}", 9, "model.") for island in (0, 1)]
    _close(ends[0], ends[1], 0.0)
    if case == "in step":
        _close(saved_tensors(root / "island_0", 9), expected, 0.0)


def test_an_island_with_only_newer_checkpoints_receives_the_quorums(prefix: Path, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    flags = {**LOCAL, "global_batch_size": 6, "save_interval": 4, "save": root, "load": root, "islands_quorum": 2}
    words = tiny_flags(prefix, **flags, compress=["outer=identity,every=3,warmup=2"])
    run_islands(3, 1, words)
    for island, iteration in ((0, 8), (1, 4), (2, 4)):
        for lost in {4, 8, 9} - {iteration}:
            shutil.rmtree(root / f"island_{island}" / f"iter_{lost:07d}")
        (root / f"island_{island}" / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    results = run_islands(3, 1, words)
    assert "that enough islands have is of iteration 4; this one has 8, and is sent" in results[0][0].stdout
    assert "joined the other islands at iteration 4, with the state of island 1" in results[0][0].stdout
    ends = [saved_tensors(root / f"island_{island}", 9, "model.") for island in range(3)]
    for end in ends[1:]:
        _close(ends[0], end, 0.0)


def test_the_launcher_starts_islands_and_restarts_a_killed_island(prefix: Path, tmp_path: Path) -> None:
    """Both islands end with the same weights, though an island was killed in between; the launcher's status is 0."""
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
        os.kill(ranks[0], signal.SIGSTOP)  # so that the run does not end before the other island is back
        os.kill(ranks[1], signal.SIGKILL)
        deadline = time.monotonic() + 90
        while output.read_text().count("model:\n") < 3:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        os.kill(ranks[0], signal.SIGCONT)
        assert launcher.wait(90) == 0, output.read_text()
    finally:
        kill_tree(launcher.pid)
    text = output.read_text()
    assert "island 1 has joined" in text
    assert "joined the other islands at iteration" in text
    weights = [saved_tensors(tmp_path / "saved" / f"island_{island}", 120, "model.") for island in (0, 1)]
    _close(weights[0], weights[1], 0.0)


def _done(folder: Path, iteration: int) -> bool:
    paths = [folder / f"log.island_{island}.jsonl" for island in (0, 1)]
    return all(path.exists() and max((e["iteration"] for e in events(path)), default=0) >= iteration for path in paths)


def _ranks(launcher: int) -> dict[int, int]:
    """Process ids of the islands' ranks, by island."""
    ranks = {}
    for pid in descendants(launcher):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if b"RANK" in variables and b"MEGATRON_ISLAND" in variables:
                ranks[int(variables[b"MEGATRON_ISLAND"])] = pid
    return ranks


def _check_traffic(log: Path) -> None:
    """Nothing crosses between rounds, and little in them."""
    sent = {event["iteration"]: event["comm"].get("outer", {}).get("wire_bytes", 0) for event in events(log)}
    exact = sent[1]
    assert exact == sent[2] > 0
    for iteration in range(3, 10):
        rounds = iteration in (5, 8, 9)
        assert (0 < sent[iteration] < exact / 8) if rounds else not sent[iteration], iteration


def test_the_anchor_goes_to_another_layout(prefix: Path, tmp_path: Path) -> None:
    """An island stops between two rounds as a single process, and goes on as two stages of two replicas."""
    spec = "outer=identity,every=3,outer-lr=0.5,outer-momentum=0.8,warmup=0"
    flags: dict[str, Any] = {**FP64, "compress": [spec]}
    train(1, tiny_flags(prefix, **flags, log_json_file=tmp_path / "whole.jsonl"))
    resumed = {**flags, "save": tmp_path / "saved", "log_json_file": tmp_path / "parts.jsonl"}
    train(1, tiny_flags(prefix, **resumed, exit_interval=4))
    layout = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "load": tmp_path / "saved"}
    train(4, tiny_flags(prefix, **resumed, **layout))
    assert losses(tmp_path / "parts.jsonl") == pytest.approx(losses(tmp_path / "whole.jsonl"), rel=1e-10)


RESIDUALS = "compressor.outer."


def _mean_residuals(folders: list[Path], iteration: int) -> dict[str, torch.Tensor]:
    """Means over islands of their compressors' residuals."""
    residuals = [saved_tensors(folder, iteration, RESIDUALS) for folder in folders]
    return {
        name: torch.stack([tensors[name] for tensors in residuals]).mean(dim=0)
        for name in residuals[0]
        if name.endswith("residual")
    }


@pytest.mark.parametrize("count", mark_repeats([1, 3], keep=[3]))
def test_another_number_of_islands_resumes_from_the_end_of_a_round(prefix: Path, tmp_path: Path, count: int) -> None:
    """The anchor and the mean of the residuals are as they were; between two rounds it is refused in a line."""
    spec = "outer=fixpoint,bits=2,error-feedback=on,every=3,warmup=0"
    flags: dict[str, Any] = {**FP64, "global_batch_size": 6, "compress": [spec], "save": tmp_path / "two"}
    run_islands(2, 1, tiny_flags(prefix, **flags, exit_interval=4, save_interval=3))
    before = _mean_residuals([tmp_path / "two" / f"island_{n}" for n in (0, 1)], 3)
    assert max(float(x.abs().max()) for x in before.values()) > 1e-6

    def go_on(step: int, **changes: Any) -> list[list[CliResult]]:
        changed = {**flags, "load": tmp_path / "two", "save": tmp_path / "then", "ckpt_step": step, **changes}
        if count == 1:  # a folder of a single run; its only island has rounds, too
            changed["load"] = tmp_path / "two" / "island_0"
            return [[run_cli(1, [SCRIPT, *tiny_flags(prefix, **changed)])]]
        with IslandProcesses(count, 1, tiny_flags(prefix, **changed)) as running:
            return running.wait()

    for (result,) in go_on(4):
        assert result.returncode == 2
        assert "were under way to a round at iteration 4" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    for (result,) in go_on(3, save_interval=4):
        result.check()
    folders = [tmp_path / "then" / f"island_{n}" for n in range(count)] if count > 1 else [tmp_path / "then"]
    _close(_mean_residuals(folders, 4), before, 1e-14)
    anchors = [saved_tensors(root, 4, "optimizer.outer_anchor") for root in (folders[0], tmp_path / "two" / "island_1")]
    _close(anchors[0], anchors[1], 0.0)
    weights = [saved_tensors(folder, 6, "model.") for folder in folders]
    for other in weights[1:]:
        _close(weights[0], other, 0.0)


def test_gradient_residuals_end_with_the_steps_in_step(prefix: Path, tmp_path: Path) -> None:
    """Differences have their own residuals; other state of a compressor (factors) is kept."""
    spec = "outer=powersgd,rank=2,in-step=compressed,every=2,warmup=2"
    run_islands(2, 1, tiny_flags(prefix, **FP64, compress=[spec], save=tmp_path / "saved", save_interval=1))
    saved = [saved_tensors(tmp_path / "saved" / "island_0", done, "compressor.") for done in (2, 3, 4)]
    residuals = [{name for name, x in tensors.items() if name.endswith("residual") and x.any()} for tensors in saved]
    assert residuals[0]
    assert not residuals[1]
    assert residuals[2] == residuals[0]
    factors = [{name: x for name, x in tensors.items() if not name.endswith("residual")} for tensors in saved]
    assert factors[0]
    _close(factors[0], factors[1], 0.0)


ROUNDS = "outer=identity,every=2,outer-lr=0.5,outer-momentum=0.8,warmup=1"
SUMS = "outer=cast,in-step=compressed,every=2,outer-lr=0.5,outer-momentum=0.8,warmup=3"


OF_TWO_RANKS = [
    pytest.param(ROUNDS, {"pipeline_model_parallel_size": 2}, id="rounds of stages"),
    pytest.param(SUMS, {"pipeline_model_parallel_size": 2}, id="in step of stages"),
    pytest.param(ROUNDS, {}, id="rounds of replicas"),
]


@pytest.mark.parametrize(("spec", "layout"), mark_repeats(OF_TWO_RANKS, keep=["rounds of stages", "in step of stages"]))
def test_two_islands_of_two_ranks_are_two_islands_of_one_process(
    prefix: Path, tmp_path: Path, spec: str, layout: dict[str, Any]
) -> None:
    """Replicas have the samples of the single process. The embedding that both stages hold crosses once, and both get
    the islands' result."""
    losses_by_size = {}
    for ranks in (1, 2):
        log = tmp_path / f"{ranks}.jsonl"
        changes = {**FP64, **(layout if ranks == 2 else {}), "compress": [spec], "log_json_file": log}
        run_islands(2, ranks, tiny_flags(prefix, **changes))
        logs = [tmp_path / f"{ranks}.island_{island}.jsonl" for island in (0, 1)]
        losses_by_size[ranks] = [losses(path) for path in logs]
        sent = [event["comm"]["outer"]["wire_bytes"] for event in events(logs[0]) if event["iteration"] == 3]
        losses_by_size[ranks].append(sent)
    assert losses_by_size[1][0] != losses_by_size[1][1]
    for single, two in zip(losses_by_size[1], losses_by_size[2], strict=True):
        assert two == pytest.approx(single, rel=1e-10)

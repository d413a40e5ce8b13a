"""The job script on a real Slurm of two emulated nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.slurm import NoSlurm, Slurm

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "slurm" / "pretrain_gpt.sbatch"
MORE_ITERATIONS = 50
"""Of the run that completes; the first run goes on until it is stopped."""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    try:
        with Slurm(tmp_path / "slurm") as started:
            yield started
    except NoSlurm as problem:
        pytest.skip(str(problem))


def _until(condition: Callable[[], object], seconds: float, story: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.3)


def test_outside_a_job_it_says_how_to_submit_it(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env["LC_ALL"] = "C"  # bash complains of a locale that is not installed
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "this is no job of Slurm: submit it with sbatch examples/slurm/pretrain_gpt.sbatch\n"
    assert not list(tmp_path.iterdir())


def _radius(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Submits a Radius run that begins at tmp_path/dense, to an sbatch that takes anything."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "dense" / "iter_0000070").mkdir(parents=True, exist_ok=True)
    base = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path / "run")}
    command = ["bash", "examples/slurm/radius.sh", "355M", "radius"]
    env = {**base, "DENSE_DIR": str(tmp_path / "dense"), **env}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("tracker", "env", "message"),
    [
        (None, {}, "holds no checkpoint: run the dense one first"),
        ("release\n", {}, "latest_checkpointed_iteration.txt: 'release' is no iteration"),
        ("\0\0", {}, "latest_checkpointed_iteration.txt: '' is no iteration"),
        ("80", {}, "dense/iter_0000080: name an iteration that there is"),
        ("70", {"DENSE_ITERATION": "080"}, "DENSE_ITERATION: there is no"),
        ("70", {"DENSE_ITERATION": "-1"}, "DENSE_ITERATION: '-1' is no iteration"),
    ],
)
def test_radius_refuses_an_unusable_start(
    tmp_path: Path, tracker: str | None, env: dict[str, str], message: str
) -> None:
    (tmp_path / "dense").mkdir()
    if tracker is not None:
        (tmp_path / "dense" / "latest_checkpointed_iteration.txt").write_text(tracker)
    done = _radius(tmp_path, **env)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


def test_radius_begins_at_the_iteration_named(tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "latest_checkpointed_iteration.txt").write_text("release\n")
    done = _radius(tmp_path, DENSE_ITERATION="070")
    assert done.returncode == 0, done.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "iter_0000070").is_dir()
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "70"


def test_a_job_outlives_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Shortly before the limit the ranks save, the job goes back into the queue, and its next run completes."""
    run, out, config = tmp_path / "run", tmp_path / "job.out", tmp_path / "run.yaml"
    config.write_text("train_iters: 20000\n")
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        pipeline_model_parallel_size=2,
        config=config,
        train_iters=None,
        log_interval=100,
        save_interval=100,
        compress=["pp-backward=lowrank,rank=2,error-feedback=lazy"],
    )
    env = {
        "RUN_DIR": str(run),
        "RANKS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",  # the emulated nodes have no addresses of their own
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--time=1", "--signal=B:USR1@40", f"--output={out}", "--gpus-per-node=1"]
    # The script's own sizes come first; its bf16 and sharded optimizer hold for the test as well.
    job = slurm.submit(SCRIPT, options, flags, env)

    def story() -> str:
        return f"{slurm.call('scontrol', 'show', 'job', str(job))}\n{out.read_text() if out.exists() else ''}"

    _until(lambda: slurm.field(job, "Restarts") == "1", 110, story)
    text = out.read_text()
    assert "time is nearly up: saving" in text, story()
    assert "saved: back into the queue" in text, story()
    reached = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert reached > 0
    config.write_text(f"train_iters: {reached + MORE_ITERATIONS}\n")
    time.sleep(5.0)  # the first run's credential is revoked for a moment; Slurm itself waits for two minutes
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=10", "StartTime=now")
    _until(lambda: slurm.field(job, "JobState") in ("COMPLETED", "FAILED", "TIMEOUT"), 150, story)
    assert slurm.field(job, "JobState") == "COMPLETED", story()
    assert int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()) == reached + MORE_ITERATIONS
    assert [event["iteration"] for event in read_events(run / "log.jsonl", "resume")] == [reached]
    for number in ("0", "1"):
        logs = list((run / "logs" / str(job) / number).rglob("std*.log"))
        assert {path.parent.name for path in logs} == {"0"}, logs  # a single local rank on each node
        assert len([path for path in logs if path.name == "stdout.log"]) == 2, logs
    assert not list(run.glob("stop.*"))

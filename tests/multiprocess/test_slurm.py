"""The job script on a real Slurm of two emulated nodes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.corpus import tiny_flags, write_documents
from tests.support.slurm import NoSlurm, Slurm

pytestmark = pytest.mark.multiprocess

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "slurm" / "pretrain_gpt.sbatch"
ITERATIONS = 1500


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


def test_a_job_outlives_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Shortly before the limit the ranks save, the job goes back into the queue, and its next run completes."""
    run, out = tmp_path / "run", tmp_path / "job.out"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        pipeline_model_parallel_size=2,
        train_iters=ITERATIONS,
        log_interval=100,
        save_interval=700,
        compress=["pp-backward=lowrank,rank=2"],
    )
    env = {
        "RUN_DIR": str(run),
        "RANKS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",  # the emulated nodes have no addresses of their own
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--time=1", "--signal=B:USR1@40", f"--output={out}", "--gpus-per-node=1"]
    # The script's own sizes come first, and what it says of bf16 and the sharded optimizer holds for the test as well.
    job = slurm.submit(SCRIPT, options, flags, env)

    def story() -> str:
        return f"{slurm.call('scontrol', 'show', 'job', str(job))}\n{out.read_text() if out.exists() else ''}"

    _until(lambda: slurm.field(job, "Restarts") == "1", 110, story)
    text = out.read_text()
    assert "time is nearly up: saving" in text, story()
    assert "saved: back into the queue" in text, story()
    reached = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 0 < reached < ITERATIONS
    time.sleep(5.0)  # the first run's credential is revoked for a moment; Slurm itself waits for two minutes
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=10", "StartTime=now")
    _until(lambda: slurm.field(job, "JobState") in ("COMPLETED", "FAILED", "TIMEOUT"), 150, story)
    assert slurm.field(job, "JobState") == "COMPLETED", story()
    assert int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()) == ITERATIONS
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in events if event["kind"] == "resume"] == [reached]
    for number in ("0", "1"):
        logs = list((run / "logs" / str(job) / number).rglob("std*.log"))
        assert {path.parent.name for path in logs} == {"0"}, logs  # one local rank on each node
        assert len([path for path in logs if path.name == "stdout.log"]) == 2, logs
    assert not list(run.glob("stop.*"))

"""The LSF job script, read and run by a stand-in for bsub."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.corpus import tiny_flags, write_documents
from tests.support.lsf import read_job, run_job

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "lsf" / "pretrain_gpt.lsf"


def test_what_the_script_asks_for() -> None:
    job = read_job(SCRIPT)
    assert (job.hosts, job.per_host) == (["h1", "h2"], 1)
    assert (job.limit_s, job.warning_s, job.warning) == (24 * 3600.0, 300.0, "USR1")
    assert job.requeue == {99}
    assert {"-r", "-x"} <= job.options.keys()


def test_a_job_outlives_its_time_limit(tmp_path: Path) -> None:
    """The signal before the limit makes the ranks save; exit value 99 starts the job again, which completes."""
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        pipeline_model_parallel_size=2,
        train_iters=1500,
        log_interval=100,
        save_interval=1000,
    )
    env = {
        "RUN_DIR": str(tmp_path / "run"),
        "RANKS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "FLAGS": " ".join(flags),
    }
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    values = run_job(SCRIPT, tmp_path, env, limits_s=[75.0, 200.0], warning_s=60.0)
    text = (tmp_path / "gpt-4711.out").read_text()
    assert values == [99, 0], text
    assert "time is nearly up: saving" in text
    assert "saved: back into the queue" in text
    assert int(tracker.read_text()) == 1500
    logs = list((tmp_path / "run" / "logs" / "4711").rglob("stdout.log"))
    assert len(logs) == 4, logs

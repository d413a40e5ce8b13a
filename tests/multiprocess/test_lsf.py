"""The LSF job script, read and run by a stand-in for bsub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.corpus import tiny_flags, write_documents
from tests.support.lsf import read_job, run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "lsf" / "pretrain_gpt.lsf"


def test_what_the_script_asks_for() -> None:
    job = read_job(SCRIPT)
    assert (job.hosts, job.per_host) == (["h1", "h2"], 1)
    assert (job.limit_s, job.warning_s, job.warning) == (24 * 3600.0, 300.0, "USR1")
    assert job.requeue == {99}
    assert {"-r", "-x"} <= job.options.keys()


def _words_of_ranks(tmp_path: Path, **env: str) -> tuple[list[int], list[str]]:
    """A job's exit values, and its calls of Python, here a stand-in that writes its arguments down."""
    record = tmp_path / "argv"
    (tmp_path / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{record}"\n')
    (tmp_path / "python").chmod(0o755)
    values = run_job(SCRIPT, tmp_path, {"RUN_DIR": str(tmp_path / "run"), **env}, limits_s=[30.0])
    return values, record.read_text().splitlines() if record.exists() else []


def test_data_paths_arrive_unchanged(tmp_path: Path) -> None:
    names = {"DATA_PATH": "/data/my corpus/doc", "VOCAB_FILE": "a; touch b", "MERGE_FILE": "$(touch c)'"}
    values, words = _words_of_ranks(tmp_path, **names)
    assert values == [0]
    for flag, name in zip(("--data-path", "--vocab-file", "--merge-file"), names.values(), strict=True):
        assert words[words.index(flag) + 1] == name
    assert words[words.index("--num-layers") + 1] == "24"


def test_flags_are_read_as_a_shell_reads_them(tmp_path: Path) -> None:
    values, words = _words_of_ranks(tmp_path, FLAGS="--data-path 'my corpus' --lr\n1")
    assert values == [0]
    assert words[-4:] == ["--data-path", "my corpus", "--lr", "1"]
    assert "--num-layers" not in words


@pytest.mark.parametrize("flags", ["--x '", "--x (", "--x `", "--x '\n--y 1"])
def test_flags_that_cannot_be_read_are_named(tmp_path: Path, flags: str) -> None:
    values, words = _words_of_ranks(tmp_path, FLAGS=flags)
    assert (values, words) == ([2], [])
    (line,) = (tmp_path / "gpt-4711.out").read_text().splitlines()
    assert line.startswith("FLAGS: a shell cannot read these words")


def test_outside_a_job_it_says_how_to_submit_it(tmp_path: Path) -> None:
    env = {**os.environ, "LC_ALL": "C"}  # bash complains of a locale that is not installed
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "this is no job of LSF: submit it with bsub < examples/lsf/pretrain_gpt.lsf\n"
    assert not list(tmp_path.iterdir())


def test_a_job_outlives_its_time_limit(tmp_path: Path) -> None:
    """The signal before the limit makes the ranks save; exit value 99 starts the job again, and that job completes."""
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        pipeline_model_parallel_size=2,
        train_iters=200,
        log_interval=5,
        save_interval=150,
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
    logs = tmp_path / "run" / "logs" / "4711"

    def is_training() -> bool:
        return any(" iteration " in log.read_text() for log in logs.rglob("stdout.log"))

    values = run_job(SCRIPT, tmp_path, env, limits_s=[200.0, 200.0], late=is_training)
    text = (tmp_path / "gpt-4711.out").read_text()
    assert values == [99, 0], text
    assert "time is nearly up: saving" in text
    assert "saved: back into the queue" in text
    assert int(tracker.read_text()) == 200
    assert len(list(logs.rglob("stdout.log"))) == 4


@pytest.mark.parametrize(("refused", "values"), [(2, [99, 0]), (1, [1])], ids=["bad input", "an error"])
def test_a_job_warned_before_it_trains_begins_again(tmp_path: Path, refused: int, values: list[int]) -> None:
    """Ranks that find the file when they start refuse it, as bad input; that is no reason to give the job up."""
    started, stop = tmp_path / "begun", tmp_path / "run" / "stop.4711"
    (tmp_path / "python").write_text(
        f'#!/bin/sh\n[ -e "{started}" ] && exit 0\n: > "{started}"\nuntil [ -e "{stop}" ]; do sleep 0.05; done\n'
        f"sleep 0.3; exit {refused}\n"
    )
    (tmp_path / "python").chmod(0o755)
    outcome = run_job(SCRIPT, tmp_path, {"RUN_DIR": str(tmp_path / "run")}, limits_s=[60.0, 60.0], late=started.exists)
    text = (tmp_path / "gpt-4711.out").read_text()
    assert outcome == values, text
    assert ("training had not begun: back into the queue" in text) == (refused == 2)
    assert not stop.exists()

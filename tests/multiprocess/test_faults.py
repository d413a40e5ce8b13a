"""Killed ranks, damaged files, signals: nothing is lost, and every rank states the problem in a line."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.find import read_tracker
from tests.support.cleanup import descendants, have_ended, kill_tree
from tests.support.cli import REPO, RankProcesses, launch_ranks_cli, run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.events import read_events
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

SCRIPT = "pretrain_gpt.py"
NAMING_SECONDS = 30.0


def _losses(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    return {event["iteration"]: event["lm_loss"] for event in read_events(path, may_be_cut=True)}


def _wait_for(condition: Any, processes: RankProcesses, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, processes.output(0).text()
        assert any(p.poll() is None for p in processes.processes), processes.output(0).text()
        time.sleep(0.02)


def _kill_until_done(prefix: Path, folder: Path, kills: int, seed: int, **changes: object) -> int:
    """Kills every rank at random moments of a run that saves each iteration, until it has ended; counts the kills."""
    saved, log = folder / "saved", folder / "log.jsonl"
    random_moment = random.Random(seed)
    iterations = 6 * kills
    layout: dict[str, object] = {"tensor_model_parallel_size": 2, "train_iters": iterations, **changes}
    flags = tiny_flags(prefix, **layout, save=saved, load=saved, save_interval=1, keep_last=3, log_json_file=log)
    done = 0
    while True:
        with launch_ranks_cli(2, [SCRIPT, *flags]) as ranks:
            if done < kills:
                before = max(_losses(log), default=0)
                _wait_for(lambda before=before: max(_losses(log), default=0) > before, ranks)
                time.sleep(random_moment.random() * 0.25)
                ranks.kill()
                codes = [result.returncode for result in ranks.wait()]
                done += any(code == -signal.SIGKILL for code in codes)
                if all(code == 0 for code in codes):
                    break
            else:
                for result in ranks.wait(240):
                    result.check()
                break
        assert isinstance(read_tracker(saved), (int, type(None)))
    reference = folder / "reference.jsonl"
    train(2, tiny_flags(prefix, **{**layout, "async_save": None}, log_json_file=reference))
    assert _losses(log) == _losses(reference)
    return done


KILLED: dict[str, dict[str, object]] = {
    "dense": {},
    "asynchronous saves": {"async_save": True},
    "delta and low-rank messages": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "sample_order": "fixed",
        "compress": [
            "pp-forward=delta-lowbits,bits=3,cache=30,rounding=stochastic",
            "pp-backward=lowrank,rank=2,error-feedback=lazy",
        ],
    },
    "stable top-k": {
        "tensor_model_parallel_size": 1,
        "compress": ["dp-grad=stable-topk,density=0.2,interval=3,flush=rotate"],
    },
}


# The third saves synchronously, as the first does.
@pytest.mark.parametrize("name", mark_repeats(KILLED, keep=["asynchronous saves", "delta and low-rank messages"]))
def test_runs_killed_at_random_moments_lose_nothing(prefix: Path, tmp_path: Path, name: str) -> None:
    assert _kill_until_done(prefix, tmp_path, 2, seed=5, **KILLED[name]) == 2


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("async_save", [None, True])
def test_fifty_kills(prefix: Path, tmp_path: Path, async_save: bool | None) -> None:
    assert _kill_until_done(prefix, tmp_path, 25, seed=17, async_save=async_save) >= 24


def _without_a_launcher() -> dict[str, str]:
    """Rank 0 keeps the store, as it does for ranks that a shell or srun starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_and_name_the_lost_rank(
    prefix: Path, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=100_000, pipeline_model_parallel_size=2, log_json_file=log)
    flags += ["--peer-timeout-seconds", "3"]
    with launch_ranks_cli(2, [SCRIPT, *flags], _without_a_launcher()) as ranks:
        _wait_for(lambda: len(_losses(log)) > 3, ranks)
        ranks.kill(victim, number)
        ranks.processes[1 - victim].wait(NAMING_SECONDS)
        result = ranks.output(1 - victim)
        assert result.returncode == 3
        message = rf"rank {1 - victim}: rank {victim} on {re.escape(socket.gethostname())} stopped answering"
        assert re.search(message, result.stderr), result.stderr
        assert "Traceback" not in result.stderr
        if number == signal.SIGSTOP:
            silence = re.search(r"no sign of life for (\d+) s", result.stderr)
            assert silence, result.stderr
            assert 3 <= int(silence[1]) < 20
        ranks.kill(victim)


LAUNCHER = ("tools/launch.py", "--nproc-per-node", "2")


@contextmanager
def _launched(words: Sequence[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher with output to a file; it and its ranks are killed at the end."""
    with out.open("wb") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen([sys.executable, *words], cwd=REPO, stdout=file, stderr=file, env=env)
    try:
        yield launcher
    finally:
        kill_tree(launcher.pid)
        launcher.wait()


def _wait_until(condition: Callable[[], object], launcher: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, out.read_text()
        assert launcher.poll() is None, out.read_text()
        time.sleep(0.02)


def test_workers_end_with_their_launcher(prefix: Path, tmp_path: Path) -> None:
    """Also when it is killed and can tell them nothing; and their checkpoints are complete."""
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=100_000, save=saved, save_interval=1, keep_last=2, log_json_file=log)
    command = [sys.executable, "tools/launch.py", "--nproc-per-node", "2", SCRIPT, *flags]
    with (tmp_path / "out").open("wb") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    workers: list[int] = []
    try:
        deadline = time.monotonic() + 90
        while len(_losses(log)) < 3:
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.05)
        workers = descendants(launcher.pid)
        assert len(workers) >= 2
        launcher.kill()
        launcher.wait()
        assert have_ended(workers, NAMING_SECONDS)
    finally:
        for pid in [launcher.pid, *workers]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert "its launcher is gone" in (tmp_path / "out").read_text()
    latest = read_tracker(saved)
    assert isinstance(latest, int)
    train(1, tiny_flags(prefix, load=saved, train_iters=latest + 1))


@pytest.mark.parametrize("words", [LAUNCHER, (*LAUNCHER, "--islands", "2")], ids=["ranks", "islands"])
def test_workers_end_with_their_launcher_from_the_first_moment(
    prefix: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Also before it watches its launcher, and before it has imported torch: its first line asks Linux for that."""
    out = tmp_path / "out"
    with _launched([*words, SCRIPT, *tiny_flags(prefix, train_iters=100_000)], out) as launcher:
        _wait_until(lambda: descendants(launcher.pid), launcher, out)
        started = descendants(launcher.pid)
        launcher.kill()
        launcher.wait()
        try:
            assert have_ended(started, 5.0)
        finally:
            for pid in started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("warm")
def test_the_launcher_restarts_from_the_last_checkpoint(prefix: Path, tmp_path: Path) -> None:
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=30, save=saved, load=saved, save_interval=5, log_json_file=log)
    crash = tmp_path / "crash.py"
    crash.write_text(
        "import os, signal, sys, threading, time\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from pathlib import Path\n"
        "from megatron.training.pretrain import main\n"
        f"tracker = Path({str(saved)!r}) / 'latest_checkpointed_iteration.txt'\n"
        "def bomb():\n"
        "    while not tracker.exists():\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    threading.Thread(target=bomb, daemon=True).start()\n"
        "raise SystemExit(main())\n"
    )
    result = run_cli(2, [str(crash), *flags], torchrun_args=["--max-restarts", "1"])
    result.check()
    assert "loaded the checkpoint of iteration" in result.stdout
    reference = tmp_path / "reference.jsonl"
    train(2, tiny_flags(prefix, train_iters=30, log_json_file=reference))
    assert _losses(log) == _losses(reference)


@pytest.mark.parametrize("number", mark_repeats([signal.SIGTERM, signal.SIGUSR1], keep=[signal.SIGTERM]))
def test_signals_save_and_end_well(prefix: Path, tmp_path: Path, number: signal.Signals) -> None:
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=100_000, save=saved, exit_signal_handler=True, log_json_file=log)
    with launch_ranks_cli(2, [SCRIPT, *flags]) as ranks:
        _wait_for(lambda: len(_losses(log)) > 3, ranks)
        ranks.kill(1, number)
        results = ranks.wait(30)
    assert [result.returncode for result in results] == [0, 0], results[0].text()
    assert read_tracker(saved) == max(_losses(log))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("number", mark_repeats([signal.SIGTERM, signal.SIGUSR1], keep=[signal.SIGUSR1]))
def test_a_signal_to_the_launcher_lets_the_ranks_save(prefix: Path, tmp_path: Path, number: signal.Signals) -> None:
    """However long that takes; the last line says so. Ranks that have ended are not started again."""
    saved, log, out = tmp_path / "saved", tmp_path / "log.jsonl", tmp_path / "out"
    flags = tiny_flags(prefix, train_iters=100_000, save=saved, exit_signal_handler=True, log_json_file=log)
    with _launched([*LAUNCHER, "--max-restarts", "1", "--shutdown-timeout", "0", SCRIPT, *flags], out) as launcher:
        _wait_until(lambda: len(_losses(log)) > 3, launcher, out)
        launcher.send_signal(number)
        assert launcher.wait(NAMING_SECONDS) == 0, out.read_text()
    iteration = max(_losses(log))
    assert read_tracker(saved) == iteration
    *_, before, last = out.read_text().splitlines()  # of two ranks, in any order
    assert f"saved checkpoint at iteration {iteration:7d} to {saved}" in before + last
    assert f"exiting after iteration {iteration}: a termination signal; saved to {saved}" in before + last


@pytest.mark.usefixtures("warm")
def test_a_signal_to_the_launcher_ends_ranks_that_do_not_save(prefix: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    flags = tiny_flags(prefix, train_iters=100_000, log_json_file=log)
    with _launched([*LAUNCHER, "--max-restarts", "1", SCRIPT, *flags], out) as launcher:
        _wait_until(lambda: len(_losses(log)) > 3, launcher, out)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(NAMING_SECONDS) == 128 + signal.SIGUSR1, out.read_text()
    assert out.read_text().splitlines()[-1] == "error: ended by SIGUSR1"


_ENDING = """
import os, signal, sys, time, types
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron.base.start import start_program

class Late:
    "Takes its time while the interpreter is taken down."
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

def main():
    global late
    rank, path = int(os.environ["RANK"]), sys.argv[1]
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    x = torch.ones(8)
    x.mark = "Python has an object of this tensor"
    if rank == 1:
        store.get("begun")
        time.sleep(0.3)
        dist.all_reduce(x)
        return 0
    late = Late()
    work = dist.all_reduce(x, async_op=True)
    del x, work
    store.set("begun", "")
    sys.setswitchinterval(1000)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass  # the message comes, and gloo's thread waits for this one to let go of the interpreter
    return 0

sys.modules["program"] = types.SimpleNamespace(main=main)
others = os.fork()
os.environ["RANK"] = "1" if others else "0"
if others:
    main()
    sys.exit(abs(os.waitstatus_to_exitcode(os.waitpid(others, 0)[1])))
start_program("program")
"""


def test_a_thread_of_gloo_aborts_no_program_at_its_end(tmp_path: Path) -> None:
    """It lets go of a tensor while a plain interpreter is taken down, as it did once in a while after a save."""
    script = tmp_path / "ending.py"
    script.write_text(_ENDING)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_time_limit_and_kill_switch(prefix: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = tiny_flags(prefix, train_iters=100_000, save=saved, exit_duration_in_mins=0.001, log_interval=1000)
    assert "--exit-duration-in-mins" in run_cli(2, [SCRIPT, *flags]).check().stdout
    saved = tmp_path / "switched"
    switch, log = tmp_path / "stop", tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=100_000, save=saved, kill_switch_file=switch, log_json_file=log)
    with launch_ranks_cli(2, [SCRIPT, *flags]) as ranks:
        _wait_for(lambda: len(_losses(log)) > 3, ranks)
        switch.touch()
        results = ranks.wait(30)
    assert [result.returncode for result in results] == [0, 0], results[0].text()
    saved_at = read_tracker(saved)
    assert saved_at == max(_losses(log))
    assert f"exiting after iteration {saved_at}: --kill-switch-file {switch} exists" in results[1].stdout

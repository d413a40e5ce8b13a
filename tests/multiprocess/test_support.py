"""The helper that starts ranks: results by rank, and every way a rank can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.cleanup import have_ended
from tests.support.cli import CliResult, launch_ranks_cli, run_cli
from tests.support.spawn import RankFailure, run_ranks
from tests.support.warm import INTERPRETER, warm_python

pytestmark = pytest.mark.multiprocess


def sum_of_ranks(offset: int) -> tuple[int, float, int]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def own_process_group(name: str) -> tuple[bool, str, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.ones(3)
    dist.all_reduce(value)
    return before, os.environ[name], value.sum().item()


def fail_on_rank(failing: int) -> None:
    print(f"hello from {dist.get_rank()}")
    dist.barrier()  # all are connected and have printed: a peer that still connects would fail without a word
    if dist.get_rank() == failing:
        raise ValueError("wrong on purpose")
    dist.all_reduce(torch.ones(1))


def hang_on_rank(hanging: int) -> None:
    if dist.get_rank() == hanging:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def die_on_rank(dying: int, number: int) -> None:
    if dist.get_rank() == dying:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def exit_quietly() -> None:
    dist.barrier()  # both have made their connections
    if dist.get_rank() == 1:
        os._exit(0)


def unpicklable_result() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    total = float(sum(range(world_size)) + 10 * world_size)
    assert run_ranks(world_size, sum_of_ranks, 10) == [(r, total, 1) for r in range(world_size)]


def test_a_function_may_make_its_own_process_group() -> None:
    results = run_ranks(2, own_process_group, "TEST_NAME", env={"TEST_NAME": "x"}, init=False)
    assert results == [(False, "x", 6.0)] * 2
    assert "TEST_NAME" not in os.environ


def test_an_exception_shows_every_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(4, fail_on_rank, 2)
    message = str(caught.value)
    assert "rank 2 first" in message.splitlines()[0]
    assert "ValueError: wrong on purpose" in message
    for rank in range(4):
        assert f"--- rank {rank}: raised" in message
        assert f"hello from {rank}" in message


def test_a_hanging_rank_is_stopped_and_its_stack_shown() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, hang_on_rank, 1, timeout=2.0)
    message = str(caught.value)
    assert "--- rank 1: still running" in message
    assert "in hang_on_rank" in message.split("--- rank 1")[1]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_rank_killed_by_a_signal_is_named(number: signal.Signals) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, die_on_rank, 0, int(number))
    message = str(caught.value)
    assert f"--- rank 0: killed by {number.name}" in message
    assert "--- rank 1: raised" in message
    if number == signal.SIGSEGV:
        assert "in die_on_rank" in message.split("--- rank 1")[0]


def test_a_rank_without_a_result_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 1: left with exit code 0 without a result"):
        run_ranks(2, exit_quietly)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankFailure, match=r"rank 0: raised[\s\S]*pickle"):
        run_ranks(1, unpicklable_result)


SCRIPT = r"""
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
sys.stdout.write(f"sum {int(value)} rank {os.environ['RANK']}\n")  # in one piece: two ranks share the stream
if sys.argv[1] == "wait":
    time.sleep(600)
if sys.argv[1] == "fail":
    sys.exit("wrong on purpose")
dist.destroy_process_group()  # gloo's threads may abort a process that ends with them alive
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("torchrun_args", [None, []])
def test_run_cli_of_ranks(script: str, torchrun_args: list[str] | None) -> None:
    good = run_cli(2, [script, "end"], torchrun_args=torchrun_args).check()
    assert sorted(good.stdout.split("\n")) == ["", "sum 2 rank 0", "sum 2 rank 1"]
    bad = run_cli(2, [script, "fail"], torchrun_args=torchrun_args)
    assert bad.returncode != 0
    assert "wrong on purpose" in bad.stderr


@pytest.mark.parametrize("forked", [False, True])
def test_run_cli_of_one_process_gives_its_exit_code_and_stops_it_in_time(forked: bool, tmp_path: Path) -> None:
    def program(name: str, code: str) -> list[str]:
        if not forked:
            return ["-c", code]
        (tmp_path / name).write_text(code)
        return [str(tmp_path / name)]

    ends = program("ends.py", "import sys; print('out'); sys.exit(7)")
    assert run_cli(1, ends) == CliResult(7, "out\n", "")
    killed = program("killed.py", "import os; os.kill(os.getpid(), 9)")
    assert run_cli(1, killed).returncode == -9
    raises = run_cli(1, program("raises.py", "import sys; sys.exit('said')"))
    assert (raises.returncode, raises.stderr) == (1, "said\n")
    environment = program("environment.py", "import os; print(os.environ['MINE'], os.environ.get('OTHER'))")
    assert run_cli(1, environment, {"MINE": "5"}).stdout == "5 None\n"
    late = program("late.py", "import threading, time, atexit; atexit.register(print, 'last');"
                   "threading.Timer(0.2, print, ['thread']).start()")  # fmt: skip
    assert run_cli(1, late).stdout == "thread\nlast\n"
    with pytest.raises(AssertionError, match=r"did not end in 1 s[\s\S]*so far"):
        run_cli(1, program("sleeps.py", "import time; print('so far'); time.sleep(600)"), timeout=1.0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_run_cli_leaves_no_worker_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    write_pid = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    script = tmp_path / "sleep.py"
    script.write_text(write_pid)
    with pytest.raises(AssertionError, match="did not end"):
        run_cli(2, [str(script)], timeout=6.0, torchrun_args=[])
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_started_by_hand_can_be_killed_one_by_one(script: str) -> None:
    with launch_ranks_cli(2, [script, "wait"]) as ranks:
        deadline = time.monotonic() + 60
        while not all("sum 2" in ranks.output(r).stdout for r in range(2)):
            assert time.monotonic() < deadline, ranks.output(0).text()
            assert all(process.poll() is None for process in ranks.processes), ranks.output(0).text()
            time.sleep(0.05)
        ranks.kill(1)
        ranks.processes[1].wait(30)
        assert ranks.processes[0].poll() is None
        with pytest.raises(AssertionError, match="rank 0: still running"):
            ranks.wait(0.1)
        ranks.kill(number=signal.SIGTERM)
        assert [result.returncode for result in ranks.wait(30)] == [-signal.SIGTERM, -signal.SIGKILL]


PROGRAM = """
import os, pathlib, signal, sys, time
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], "torch" in sys.modules)
print("said", file=sys.stderr)
if sys.argv[1] == "wait":
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(7)
"""


def _wait_for_pid(folder: Path) -> int:
    deadline = time.monotonic() + 60
    while not (text := (folder / "pid").read_text() if (folder / "pid").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(text)


def test_a_warm_interpreter_runs_programs_as_another_does(tmp_path: Path) -> None:
    """From a file, a text and its input, with arguments and environment; other calls go to the real interpreter."""
    (tmp_path / "program.py").write_text(PROGRAM)
    outputs = {}
    with warm_python() as python:
        for name in (python, INTERPRETER):
            env = {**os.environ, "WORD": "\u00e4 b"}
            calls = (["program.py", "a b"], ["-", "c"], ["-u", "-m", "program", "d"], ["-c", PROGRAM, "e"])
            runs = [
                subprocess.run([name, *words], input=PROGRAM, cwd=tmp_path, env=env, capture_output=True, text=True)
                for words in (*calls, ["-E", "-c", "print(5)"])
            ]
            outputs[name] = [(run.returncode, run.stdout.replace("True", "False"), run.stderr) for run in runs]
            assert ["True" in run.stdout for run in runs] == [name == python] * 4 + [False]
    assert outputs[python] == outputs[INTERPRETER]
    assert [code for code, _, _ in outputs[python]] == [7, 7, 7, 7, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("victim", ["interpreter", "program"])
def test_a_warm_interpreter_and_its_program_end_together(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "WORD": ""}
    with warm_python() as python, subprocess.Popen([python, "program.py", "wait"], cwd=tmp_path, env=env) as process:
        pid = _wait_for_pid(tmp_path)
        os.kill(pid if victim == "program" else process.pid, number)
        assert process.wait(20) == -number
        assert have_ended([pid])

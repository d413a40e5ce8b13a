"""Runs the command lines as a user does: on one process, under the launcher, or as N processes to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron.distributed.store import serve_store
from tests.support.cleanup import die_with_parent, kill_tree
from tests.support.device import backend_of_tests, rank_variables
from tests.support.forked import Forked
from tests.support.spawn import rendezvous_env

REPO = Path(__file__).resolve().parents[2]

Process = Forked | subprocess.Popen[bytes]


@dataclass(frozen=True)
class CliResult:
    """Exit code and output of a command; a negative exit code is the signal that ended it."""

    returncode: int
    stdout: str
    stderr: str

    def text(self) -> str:
        """Both streams, for a message."""
        return f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}"

    def check(self) -> CliResult:
        """Itself, when the command succeeded.

        Raises:
            AssertionError: when it did not; with its output.
        """
        if self.returncode != 0:
            raise AssertionError(f"exit code {self.returncode}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}")
        return self


def run_cli(
    world_size: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
    torchrun_args: Sequence[str] | None = None,
) -> CliResult:
    """Runs ``python ARGV`` in the repository's folder, as so many ranks or under tools/launch.py.

    Args:
        world_size: processes; several are ranks of a world, and their outputs are concatenated in order of ranks.
        argv: the script and its arguments.
        env: environment variables added.
        timeout: seconds; then the command and its children are killed.
        torchrun_args: arguments of the launcher, as ``--max-restarts``; None runs the ranks without one.

    Raises:
        AssertionError: when the time is over; with the output so far.
    """
    if torchrun_args is None and world_size > 1:
        with RankProcesses(world_size, argv, env) as ranks:
            results = ranks.wait(timeout)
        failed = next((result.returncode for result in results if result.returncode), 0)
        return CliResult(failed, "".join(r.stdout for r in results), "".join(r.stderr for r in results))
    words = list(argv)
    if torchrun_args is not None:
        launcher = ["tools/launch.py", "--standalone", f"--nproc-per-node={world_size}", *torchrun_args]
        words = [*launcher, *([] if backend_of_tests() == "gloo" else ["tests/support/share_gpu.py"]), *argv]
    with tempfile.TemporaryDirectory(prefix="cli-") as folder:
        process = _start(words, Path(folder), "", _environment(env))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            output = _result(process, Path(folder), "").text()
            raise AssertionError(f"python {' '.join(words)} did not end in {timeout:g} s\n{output}") from None
        finally:
            _kill(process)
        return _result(process, Path(folder), "")


class RankProcesses:
    """N plain processes of a world, without a launcher that restarts or stops them.

    Use as a context manager: leaving it kills the processes that still run.
    """

    def __init__(self, world_size: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-cli-")
        self._store = serve_store("127.0.0.1", 0, seconds=300.0)
        shared = rendezvous_env(world_size, self._store.port) | dict(env or {})
        self.processes = [
            _start(
                argv,
                Path(self._folder.name),
                str(rank),
                _environment(shared | rank_variables(rank) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank, or (None) to all ranks in quick succession."""
        for index, process in enumerate(self.processes):
            if rank in (None, index) and process.poll() is None:
                process.send_signal(number)

    def output(self, rank: int) -> CliResult:
        """The output of a rank so far; while the rank runs, its exit code is given as 0."""
        return _result(self.processes[rank], Path(self._folder.name), str(rank))

    def wait(self, timeout: float = 240.0) -> list[CliResult]:
        """Waits for all ranks.

        Raises:
            AssertionError: when a rank still runs after ``timeout`` seconds; with every rank's output.
        """
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(self._report(timeout)) from None
        return [self.output(rank) for rank in range(len(self.processes))]

    def close(self) -> None:
        """Kills running processes and removes the output files."""
        for process in self.processes:
            _kill(process)
        self._folder.cleanup()

    def _report(self, timeout: float) -> str:
        lines = [f"not every rank ended in {timeout:g} s"]
        for rank, process in enumerate(self.processes):
            state = "still running" if process.poll() is None else f"exit code {process.returncode}"
            lines.append(f"--- rank {rank}: {state}\n{self.output(rank).text()}")
        return "\n".join(lines)


def launch_ranks_cli(world_size: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> RankProcesses:
    """Starts ``python ARGV`` once per rank, with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* set."""
    return RankProcesses(world_size, argv, env)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(extra or {})


def _start(argv: Sequence[str], folder: Path, name: str, env: dict[str, str]) -> Process:
    """Starts a program in a session of its own, its output going to files (a full pipe would stop it)."""
    stdout, stderr = folder / f"stdout{name}", folder / f"stderr{name}"
    if argv[0] != "-c":
        return Forked(argv, REPO, env, stdout, stderr)
    with stdout.open("wb") as out, stderr.open("wb") as err:
        return subprocess.Popen(
            [sys.executable, *argv],
            cwd=REPO,
            env=env,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _result(process: Process, folder: Path, name: str) -> CliResult:
    stdout, stderr = ((folder / f"{kind}{name}").read_text(errors="replace") for kind in ("stdout", "stderr"))
    return CliResult(process.returncode or 0, stdout, stderr)


def _kill(process: Process) -> None:
    """Kills a process that still runs, with its descendants."""
    if process.poll() is None:
        kill_tree(process.pid)
    process.wait()

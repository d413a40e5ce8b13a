"""Runs a Python program in a fork of a process that has torch imported: like ``Popen``, but seconds faster."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.cleanup import die_with_parent
from tests.support.spawn import context_of_tests, end_at_once_without_a_launcher


class Forked:
    """A program (``SCRIPT ...``, ``-m MODULE ...`` or ``-c TEXT ...``) in its own session.

    It has the part of ``Popen`` that tests use.
    A fork does not test the interpreter itself: its flags, effects of importing, its end.

    Args:
        argv: the program and its arguments, without the interpreter.
        cwd: folder that it runs in.
        env: its whole environment.
        stdout, stderr: files for its output.
    """

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> None:
        self.args = list(argv)
        for path in (stdout, stderr):
            path.touch()  # to be read before the fork has opened it
        self._process = context_of_tests().Process(
            target=_run, args=(self.args, str(cwd), dict(env), str(stdout), str(stderr))
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """As ``returncode``."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: when it still runs after so many seconds.
        """
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(argv: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str) -> None:
    _redirect(os.devnull, os.O_RDONLY, 0)
    _redirect(stdout, os.O_WRONLY | os.O_TRUNC, 1)
    _redirect(stderr, os.O_WRONLY | os.O_TRUNC, 2)
    interpret(argv, cwd, env)


def interpret(argv: list[str], cwd: str, env: Mapping[str, str]) -> NoReturn:
    """Runs a program from start to end, as the interpreter does, in its own session; a forked process calls it."""
    die_with_parent()
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    end_at_once_without_a_launcher()
    sys.executable = env.get("PYTHON_EXEC", sys.executable)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _exit_code(argv)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(path: str, flags: int, fd: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, fd)
    os.close(opened)


def _exit_code(argv: list[str]) -> int:
    """Runs the program as ``__main__``."""
    sys.modules.pop("__mp_main__", None)
    options: dict[str, Any] = {"run_name": "__main__"}
    try:
        if argv[0] == "-":
            sys.argv, sys.path[:0] = argv, [os.getcwd()]
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
        elif argv[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *argv[2:]], [os.getcwd()]
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
        elif argv[0] == "-m":
            sys.argv, sys.path[:0] = argv[1:], [os.getcwd()]
            runpy.run_module(argv[1], alter_sys=True, **options)
        else:
            sys.argv, sys.path[:0] = argv, [str(Path(argv[0]).resolve().parent)]
            runpy.run_path(argv[0], **options)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

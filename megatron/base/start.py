"""The first and the last line of a program: a rank does not outlive its launcher, and ends as soon as it is done.

torch is not imported here: that takes seconds, in which the launcher may be killed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ISLANDS_LAUNCHER = "MEGATRON_ISLANDS_LAUNCHER"
"""Variable with the process id of the launcher of all islands, with which the launcher of each ends."""
_PARENT_LOST = 3
_MOST_TOOLS = 6
"""Tools that sys.monitoring has numbers for."""
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def start_program(module: str) -> NoReturn:
    """Ends the process with the status of ``main`` of a module, called with the command line's words."""
    end_with_launcher()
    end_program(import_module(module).main())


def end_with_launcher() -> None:
    """Asks Linux to end this process when the launcher that has started it, if any, is gone.

    From when ranks watch each other, their watch does so, and says why: see ``outlive_launcher``.
    """
    parent = os.environ.get(ISLANDS_LAUNCHER, "")
    launcher = int(parent) if parent.isdecimal() else launcher_pid()
    if launcher is not None:
        _ask_for_signal(signal.SIGTERM if parent else signal.SIGKILL)
        if os.getppid() != launcher:  # it was gone before it was asked for
            os._exit(_PARENT_LOST)


def outlive_launcher() -> None:
    """Takes back what ``end_with_launcher`` has asked for, in the same thread: Linux keeps it for each."""
    _ask_for_signal(0)


def _ask_for_signal(number: int) -> None:
    """Asks Linux for a signal at the end of the parent; elsewhere nothing is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def launcher_pid() -> int | None:
    """The process id of the launcher (torchrun) that this process must not outlive; None without one.

    Ranks that a shell, srun or ssh started may outlive it on purpose (nohup, setsid), or are ended by it. The parent
    of a worker of torchrun is torchrun; the result is 0, which no process has, when that is gone already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    if parent == 1:  # an orphan's, unless torchrun is what a container runs
        try:
            name = Path("/proc/1/comm").read_text()
        except OSError:
            return 0
        return parent if name.startswith(("pt_", "python", "torchrun")) else 0
    return parent


def end_program(status: int) -> NoReturn:
    """Ends the process after its threads and exit handlers, as Python does, but leaves the interpreter standing.

    Threads of torch's process groups outlive these. One that lets go of a tensor while the interpreter is taken down
    aborts the process. Without torch, and under a profiler or debugger, which prints at the end, Python goes its way.
    """
    if "torch" not in sys.modules or _observed():
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # Python says that it cannot write
    os._exit(status)


def _observed() -> bool:
    """Whether a profiler, a debugger or a tool that measures coverage looks on.

    From Python 3.12 on, cProfile and others come by way of sys.monitoring instead.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    seen = monitoring is not None and any(monitoring.get_tool(number) is not None for number in range(_MOST_TOOLS))
    return seen or sys.gettrace() is not None or sys.getprofile() is not None


def launch() -> NoReturn:
    """The console script megatron-cc-launch; those that follow are of the same names."""
    start_program("megatron.topology.launch_command")


def train() -> NoReturn:
    start_program("megatron.evaluation.pretrain_command")


def train_bert() -> NoReturn:
    start_program("megatron.training.pretrain_bert")


def train_t5() -> NoReturn:
    start_program("megatron.training.pretrain_t5")


def plan() -> NoReturn:
    start_program("megatron.planner.command")


def generate() -> NoReturn:
    start_program("megatron.inference.generate_command")


def serve() -> NoReturn:
    start_program("megatron.inference.serve_command")


def evaluate() -> NoReturn:
    start_program("megatron.evaluation.command")


def evaluate_lm() -> NoReturn:
    start_program("megatron.evaluation.harness_command")


def sweep() -> NoReturn:
    start_program("megatron.evaluation.sweep_command")

"""Start and end of a program: a rank does not outlive its launcher, and exits as soon as it is done.

torch is not imported here: the import takes seconds, during which the launcher may be killed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from megatron.base.user_text import spell
from megatron.base.value_type import FALSE_WORDS

ISLANDS_LAUNCHER = "MEGATRON_ISLANDS_LAUNCHER"
"""Variable with the process id of the launcher of all islands; each island's launcher ends with it."""
ONE_TERMINAL = "MEGATRON_ONE_TERMINAL"
"""Variable that is set if the launchers of all machines print to the same terminal."""
_PARENT_LOST = 3
_MAX_TOOLS = 6
"""Number of tool ids of sys.monitoring."""
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def start_program(module: str, **options: str) -> NoReturn:
    """Run ``main`` of a module on the command line, with the options if any, and exit with its status.

    Linux is asked to end this process when the launcher that started it, if any, is gone. Once ranks monitor each
    other, their monitor ends the process and reports the reason: see ``outlive_launcher``.
    """
    parent = os.environ.get(ISLANDS_LAUNCHER, "")
    launcher = int(parent) if parent.isdecimal() else launcher_pid()
    if launcher is not None:
        _ask_for_signal(signal.SIGTERM if parent else signal.SIGKILL)
        if os.getppid() != launcher:  # it was gone before the signal was requested
            os._exit(_PARENT_LOST)
    end_program(import_module(module).main(**options))


def outlive_launcher() -> None:
    """Cancel the request of ``start_program``; call it in the same thread, since requests are per thread."""
    _ask_for_signal(0)


def _ask_for_signal(number: int) -> None:
    """Ask Linux for a signal when the parent ends; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def launcher_pid() -> int | None:
    """Process id of the launcher (torchrun) that this process must not outlive; None without a launcher.

    Ranks started by a shell, srun or ssh may outlive it on purpose (nohup, setsid), or are ended by it. The parent of
    a torchrun worker is torchrun; if it is already gone, the result is 0, which is not a process id.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    if parent == 1:  # an orphan, unless torchrun is the main process of a container
        try:
            name = Path("/proc/1/comm").read_text()
        except OSError:
            return 0
        return parent if name.startswith(("pt_", "python", "torchrun")) else 0
    return parent


def end_program(status: int) -> NoReturn:
    """Exit after threads and exit handlers have finished, like Python, but without finalizing the interpreter.

    Threads of torch's process groups outlive both, and abort the process if they release a tensor while the interpreter
    is finalized. Without torch, or under a profiler or debugger, which prints at exit, Python exits normally.
    """
    # Since Python 3.12, cProfile and others use sys.monitoring instead of trace functions.
    monitoring: Any = getattr(sys, "monitoring", None)
    is_monitored = monitoring is not None and any(
        monitoring.get_tool(number) is not None for number in range(_MAX_TOOLS)
    )
    is_observed = is_monitored or sys.gettrace() is not None or sys.getprofile() is not None
    if "torch" not in sys.modules or is_observed:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # Python reports that it cannot write
    os._exit(status)


def launch() -> NoReturn:
    """Console script megatron-cc-launch; the following functions are the console scripts of their names."""
    start_program("megatron.launcher.command")


def train() -> NoReturn:
    """The program of pretrain_gpt.py; with Optimus-CC's ``--get_val_ppls`` that of val_check_gpt.py."""
    words, losses = sys.argv[1:], False
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and spell(flag) == "get-val-ppls":
            losses = (value if equals else following).lower() not in FALSE_WORDS
            break
    start_program("megatron.evaluation.sweep_command" if losses else "megatron.training.pretrain")


def train_bert() -> NoReturn:
    start_program("megatron.training.pretrain", model_type="bert")


def train_t5() -> NoReturn:
    start_program("megatron.training.pretrain", model_type="t5")


def plan() -> NoReturn:
    start_program("megatron.planner.command")


def choose() -> NoReturn:
    start_program("megatron.training.choose_command")


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

"""A stand-in for LSF: a `bsub` that reads a script's #BSUB lines and obeys them, on this machine.

It knows the options that our scripts use and refuses others: -J name, -n slots, -R span[ptile=K], -W [hours:]minutes,
-wt and -wa (a signal to the script before the limit), -Q (exit values that start the job again), -o file, and -gpu, -x
and -r, which ask for nothing here. `blaunch -z HOSTS` starts a command once for each host.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FLAGS = frozenset({"-x", "-r"})
_VALUES = frozenset({"-J", "-n", "-R", "-W", "-wt", "-wa", "-Q", "-o", "-gpu"})
_BLAUNCH = """#!/usr/bin/env bash
# Once for each host, all at once; the first failure is the exit status.
[ "$1" = -z ] || { echo "blaunch: expected -z HOSTS" >&2; exit 2; }
read -ra hosts <<< "$2"; shift 2
pids=(); status=0
for host in "${hosts[@]}"; do LSF_STAND_IN_HOST=$host "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""


@dataclass
class Job:
    """Options of a job script.

    Args:
        options: values of its options, as written.
        slots, per_host: -n and ptile.
        limit_s, warning_s: -W and -wt in seconds.
        warning: -wa, a signal's name.
        requeue: -Q.
    """

    options: dict[str, str] = field(default_factory=dict)
    slots: int = 1
    per_host: int = 1
    limit_s: float = 3600.0
    warning_s: float = 0.0
    warning: str = ""
    requeue: frozenset[int] = frozenset()

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts that it runs on."""
        return [f"h{number}" for number in range(1, -(-self.slots // self.per_host) + 1)]


def read_job(script: Path) -> Job:
    """Parses the #BSUB lines.

    Raises:
        ValueError: for an option that LSF does not have, or this stand-in does not know.
    """
    job = Job()
    for line in script.read_text().splitlines():
        if not line.startswith("#BSUB"):
            continue
        words = shlex.split(line.removeprefix("#BSUB"))
        while words:
            name = words.pop(0)
            if name in _FLAGS:
                job.options[name] = ""
            elif name in _VALUES and words:
                job.options[name] = words.pop(0)
            else:
                raise ValueError(f"bsub: {name} in {line!r}: unknown, or without its value")
    options = job.options
    job.slots = int(options.get("-n", "1"))
    span = re.fullmatch(r"span\[ptile=(\d+)\]", options.get("-R", "span[ptile=1]"))
    if span is None:
        raise ValueError(f"bsub: -R {options['-R']}: not understood")
    job.per_host = int(span[1])
    hours, _, minutes = options.get("-W", "1:00").rpartition(":")
    job.limit_s = (int(hours or 0) * 60 + int(minutes)) * 60.0
    job.warning_s = float(options.get("-wt", "0")) * 60.0
    job.warning = options.get("-wa", "")
    if job.warning and not hasattr(signal, f"SIG{job.warning}"):
        raise ValueError(f"bsub: -wa {job.warning}: no signal is called so")
    job.requeue = frozenset(int(value) for value in options.get("-Q", "").split())
    return job


def run_job(
    script: Path,
    folder: Path,
    env: Mapping[str, str],
    limits_s: list[float],
    late: Callable[[], bool] | None = None,
) -> list[int]:
    """Runs a script as LSF would, again as long as its exit value asks for that.

    Args:
        script: with #BSUB lines.
        folder: of the host file, of `blaunch`, and of the output (-o, %J replaced).
        env: variables of the job.
        limits_s: seconds of each run, in place of -W.
        late: when it turns true, the signal of -wa is sent to the first run, in place of -wt.

    Returns:
        The exit values of its runs.
    """
    job = read_job(script)
    (folder / "hosts").write_text("".join(f"{host}\n" * job.per_host for host in job.hosts))
    (folder / "blaunch").write_text(_BLAUNCH)
    (folder / "blaunch").chmod(0o755)
    variables = {
        "LSB_JOBID": "4711",
        "LSB_DJOB_HOSTFILE": str(folder / "hosts"),
        "LSB_JOBNAME": job.options.get("-J", ""),
    }
    variables["LC_ALL"] = "C"  # bash complains of a locale that is not installed
    values: list[int] = []
    repo = Path(__file__).resolve().parents[2]
    with (folder / job.options.get("-o", "out").replace("%J", "4711")).open("ab") as out:
        for limit in limits_s:
            process = subprocess.Popen(
                ["bash", str(script)],
                env={**os.environ, **env, **variables, "PATH": f"{folder}:{env.get('PATH', os.environ['PATH'])}"},
                stdout=out,
                stderr=out,
                cwd=repo,
                start_new_session=True,
            )
            values.append(_wait(process, job, limit, late))
            late = None
            if values[-1] not in job.requeue:
                break
    return values


def _wait(process: subprocess.Popen[bytes], job: Job, limit: float, late: Callable[[], bool] | None) -> int:
    start, warned = time.monotonic(), late is None or not job.warning
    while process.poll() is None:
        passed = time.monotonic() - start
        if late is not None and not warned and late():
            process.send_signal(getattr(signal, f"SIG{job.warning}"))
            warned = True
        if passed >= limit:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    return process.returncode

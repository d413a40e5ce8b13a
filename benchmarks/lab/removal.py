"""Removes a laboratory of network namespaces: its processes first, then its hosts, links and control groups."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.lab import cpu_limit

_NAME = re.compile(r"\bnl(\d+)[bhv]\d*\b")


def _run_ip(*words: str) -> str:
    """Run a command of iproute2; return its output, empty if it failed, such as for a missing host."""
    return subprocess.run(words, capture_output=True, text=True).stdout


def _hosts(key: str) -> list[str]:
    return re.findall(rf"^({key}h\d*)\b", _run_ip("ip", "netns", "list"), re.MULTILINE)


def _links(key: str) -> list[str]:
    return re.findall(rf"^\d+: ({key}[bv]\d*)\b", _run_ip("ip", "-o", "link", "show"), re.MULTILINE)


def _processes(host: str) -> list[int]:
    return [int(pid) for pid in _run_ip("ip", "netns", "pids", host).split()]


def kill(hosts: Sequence[str]) -> list[str]:
    """Kill all processes on some hosts; a launcher's ranks have left its session and may outlive it.

    Returns:
        A line for each host that keeps processes.
    """
    pids_by_host = ((host, cpu_limit.kill(partial(_processes, host))) for host in hosts)
    return [
        f"host {host}: processes {', '.join(map(str, pids))} cannot be killed" for host, pids in pids_by_host if pids
    ]


def remove(key: str) -> list[str]:
    """End the processes on a laboratory's hosts, and remove all of it. Missing parts are skipped.

    Returns:
        A line for each thing that remains.
    """
    problems = kill(_hosts(key))
    for host in _hosts(key):
        _run_ip("ip", "netns", "del", host)
    for link in _links(key):
        _run_ip("ip", "link", "del", link)
    problems += [f"{name}: cannot be removed" for name in (*_hosts(key), *_links(key))]
    return problems + cpu_limit.clean(f"{key}h")


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie, which it may remain forever in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def clean() -> tuple[list[str], list[str]]:
    """Remove the laboratories of dead processes.

    Returns:
        Their keys, and a line for each thing that remains.
    """
    names = [_run_ip("ip", "netns", "list"), _run_ip("ip", "-o", "link", "show"), *cpu_limit.groups("nl")]
    pids = {int(match[1]) for text in names for match in _NAME.finditer(text)}
    dead = sorted(f"nl{pid}" for pid in pids if has_ended(pid))
    return dead, [line for key in dead for line in remove(key)]

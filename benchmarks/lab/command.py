"""Runs a training command on virtual hosts whose links have given rates. Needs Linux and root.

    sudo python tools/netlab.py --hosts 4 --rate 100mbit -- pretrain_gpt.py ...
    sudo python tools/netlab.py --hosts 2 --ranks-per-host 2 --rate 1gbit --rate 1=200mbit -- pretrain_gpt.py ...
    sudo python tools/netlab.py --device cuda --rate 1gbit -- pretrain_gpt.py ...   ranks on this machine's GPUs
    sudo python tools/netlab.py clean          removes what killed runs left behind, processes included

Each host is a network namespace on a bridge; its link is shaped in both directions by `tc tbf`, and the processes
inside communicate over loopback. `--cpus-per-host 0.5` gives each host its own share of the processors. The command
runs under tools/launch.py, with a node per host, over gloo; with `--device cuda` over NCCL, whose sockets use the
hosts' links even if several ranks share a GPU. When the command has ended or timed out (but not after Ctrl-C), the
interfaces' byte counters are printed; the exit status is the command's. In any case, all hosts are removed, and ranks
that do not react to SIGTERM within seconds are killed. Only SIGKILL leaves hosts behind; `clean` removes them.
Concurrent laboratories do not interfere.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from benchmarks.lab.hosts import Lab, LabError, Traffic, check_permission, run_with_hosts, say
from benchmarks.lab.removal import clean

MAX_RATE = 600 * 10**9
"""Bits per second; tc counts the bytes queued at a link, 50 ms of them, in 32 bits."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str) -> int | None:
    """Parse bits per second, as in ``100mbit``; None for ``none``.

    Raises:
        LabError: when it is not a rate.
    """
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?)bit", text.lower())
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1000 <= rate <= MAX_RATE:
        raise LabError(f"--rate {text}: write 100mbit, 2.5gbit (1kbit to {format_rate(MAX_RATE)}) or none")
    return int(rate)


def parse_rates(words: Sequence[str], hosts: int) -> list[int | None]:
    """Parse the rate of every host: RATE for all hosts, HOST=RATE for a host; later words win.

    Raises:
        LabError: when a word is neither, or names no host.
    """
    rates: list[int | None] = [None] * hosts
    for word in words:
        host, equals, rate = word.rpartition("=")
        if not equals:
            rates = [parse_rate(rate)] * hosts
        elif re.fullmatch("[0-9]{1,9}", host) and int(host) < hosts:
            rates[int(host)] = parse_rate(rate)
        else:
            raise LabError(f"--rate {word}: there are hosts 0 to {hosts - 1}; write HOST=RATE, such as 0=1gbit")
    return rates


def format_rate(rate: int | None) -> str:
    """Format a rate, such as 100mbit."""
    if rate is None:
        return "unshaped"
    for unit, size in (("g", 10**9), ("m", 10**6), ("k", 10**3)):
        if rate >= size:
            return f"{rate / size:g}{unit}bit"
    return f"{rate}bit"


def report(rates: Sequence[int | None], traffic: Sequence[Traffic], seconds: float) -> str:
    """Format a table of the interfaces' counters."""
    lines = [f"{'host':>4}  {'link':>10}  {'sent MB':>10}  {'received MB':>11}  {'mean Mbit/s sent':>16}"]
    for index, (rate, counted) in enumerate(zip(rates, traffic, strict=True)):
        mean = counted.sent * 8 / max(seconds, 1e-9) / 1e6
        sent_mb, received_mb = counted.sent / 1e6, counted.received / 1e6
        lines.append(f"{index:>4}  {format_rate(rate):>10}  {sent_mb:>10.2f}  {received_mb:>11.2f}  {mean:>16.1f}")
    return "\n".join([*lines, f"in {seconds:.1f} s, launch included"])


def check_command(words: Sequence[str]) -> list[str]:
    """Check the command of the hosts, and remove the ``--`` before it.

    Raises:
        LabError: when it is neither an existing Python script nor -m and an existing module.
    """
    command = list(words[1:] if words[0] == "--" else words)
    program = command[0] if command else ""
    if program in ("-m", "--module") and len(command) > 1:
        if not _is_module(command[1]):
            raise LabError(f"-m {command[1]}: there is no such module in {Path.cwd()}, nor is it installed")
    elif not program or program.startswith("-"):
        raise LabError("give a Python script or -m MODULE after --, such as: -- pretrain_gpt.py --num-layers 4 ...")
    elif not os.path.isfile(program) and not os.path.isfile(os.path.join(program, "__main__.py")):
        raise LabError(f"{program}: there is no such Python script; give its path relative to {Path.cwd()}")
    return command


def _is_module(name: str) -> bool:
    """Return whether a module is in this folder, as the ranks see it, or installed; imports none."""
    top, *submodules = name.split(".")
    if not all(map(str.isidentifier, (top, *submodules))) or top == "__main__":
        return False
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for submodule in submodules:
        spec = spec and PathFinder.find_spec(submodule, list(spec.submodule_search_locations or ()))
    return spec is not None


def parse_options() -> argparse.Namespace:
    """Parse the command line.

    Raises:
        LabError: for values that are out of range.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (4)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (1)")
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="[HOST=]RATE",
        help=f"rate of the links in each direction, such as 100mbit (1kbit to {format_rate(MAX_RATE)}), or none for "
        "unshaped links (none); 0=1gbit for a single host",
    )
    parser.add_argument(
        "--cpus-per-host",
        type=float,
        default=None,
        metavar="N",
        help="processors reserved for each host, such as 0.5 (all hosts share the machine)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the ranks; cuda sets up NCCL (cpu)"
    )
    parser.add_argument("--timeout", type=float, default=None, help="seconds until the run is stopped, with status 124")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="-- and a Python script or -m MODULE, with its arguments; or clean",
    )
    options = parser.parse_args()
    if not options.command:
        parser.error("give the command after --, such as: -- pretrain_gpt.py --num-layers 4 ...")
    if not 1 <= options.hosts <= 200 or options.ranks_per_host < 1:
        raise LabError("--hosts must be 1 to 200, and --ranks-per-host at least 1")
    if options.cpus_per_host is not None and not 0.1 <= options.cpus_per_host <= 1024:
        raise LabError(f"--cpus-per-host {options.cpus_per_host:g}: must be 0.1 to 1024")
    if options.timeout is not None and not 0 < options.timeout < math.inf:
        raise LabError(f"--timeout {options.timeout:g}: must be a number of seconds above 0")
    if options.device == "cuda" and options.command != ["clean"]:
        import torch  # takes seconds

        if not torch.cuda.is_available():
            raise LabError("--device cuda: torch sees no CUDA device; leave it out to train over gloo")
    if options.command[0] == "clean" and len(options.command) > 1:
        raise LabError("`clean` takes no arguments; to run a script of that name, write: -- clean ...")
    return options


def _run() -> int:
    options = parse_options()
    if options.command == ["clean"]:
        check_permission()
        removed, problems = clean()
        print("\n".join(f"removed {key}" for key in removed) or "nothing to remove")
        for line in problems:
            say(f"error: {line}")
        return 1 if problems else 0
    command = check_command(options.command)
    with Lab(parse_rates(options.rate, options.hosts), options.cpus_per_host, options.device) as lab:
        before, start = lab.traffic(), time.monotonic()
        status = lab.run(command, options.ranks_per_host, options.timeout)
        seconds = time.monotonic() - start
        counted = [end - start for end, start in zip(lab.traffic(), before, strict=True)]
        print(report(lab.rates, counted, seconds), flush=True)
    return status


def main() -> int:
    return run_with_hosts("netlab", _run)

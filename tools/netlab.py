#!/usr/bin/env python3
"""Runs a training command on hosts of its own making, with links of the rates you ask for. Linux, root.

    sudo python tools/netlab.py --hosts 4 --rate 100mbit -- pretrain_gpt.py ...
    sudo python tools/netlab.py --hosts 2 --ranks-per-host 2 --rate 1gbit --rate 1=200mbit -- pretrain_gpt.py ...
    sudo python tools/netlab.py clean          removes what killed runs left behind

Every host is a network namespace on a bridge; its link is shaped in both directions by `tc tbf`, and the processes
inside talk over loopback. `--cpus-per-host 0.5` gives each a processor share of its own. The command runs under
torchrun, one node to a host, over gloo. When it ends, however it ends, everything is removed; the interfaces' own byte
counters are printed. Two laboratories at once do not meet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.cpu_limit import CpuLimit, CpuLimitError
from tools.cpu_limit import clean as remove_limits

SUBNET = "10.77.0"
"""The same in every laboratory: a bridge without an address joins nothing but its own hosts."""
PORT = 29500
FRAME = 1514
"""Bytes of a full Ethernet frame."""
QUEUE = 1 << 20
"""Least bytes that wait at a link before any are dropped: what a switch holds for a port. 50 ms of a link where that is
more. With less, a message's burst loses its own end, and waits for TCP to notice."""
GRACE_SECONDS = 45.0
"""How long the other hosts may take to notice that one has gone."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_NAME = re.compile(r"nl(\d+)([bhv]\d*)")


class LabError(Exception):
    """What the laboratory needs and does not have; one line."""


def parse_rate(text: str) -> int | None:
    """Bits per second of ``100mbit`` and the like; None for ``none``.

    Raises:
        LabError: when it is no rate.
    """
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    rate = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if rate < 1000:
        raise LabError(f"--rate {text}: write 100mbit, 2.5gbit (at least 1kbit) or none")
    return rate


def parse_rates(words: Sequence[str], hosts: int) -> list[int | None]:
    """The rate of every host: RATE for all, HOST=RATE for one; later words win.

    Raises:
        LabError: for a word that is neither, or a host that there is not.
    """
    rates: list[int | None] = [None] * hosts
    for word in words:
        host, equals, rate = word.rpartition("=")
        if not equals:
            rates = [parse_rate(rate)] * hosts
        elif host.isdigit() and int(host) < hosts:
            rates[int(host)] = parse_rate(rate)
        else:
            raise LabError(f"--rate {word}: there are hosts 0 to {hosts - 1}; write HOST=RATE, such as 0=1gbit")
    return rates


def describe(rate: int | None) -> str:
    """A rate as people write it."""
    if rate is None:
        return "unshaped"
    for unit, size in (("g", 10**9), ("m", 10**6), ("k", 10**3)):
        if rate >= size:
            return f"{rate / size:g}{unit}bit"
    return f"{rate}bit"


def call(*words: str) -> str:
    """Runs a command of iproute2 and returns what it printed.

    Raises:
        LabError: when it fails, with what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Traffic:
    """What a host's interface counted, in bytes."""

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


class Lab:
    """Hosts on a bridge; a context manager that makes and removes them.

    Args:
        rates: bits per second of every host's link, each way; None leaves it unshaped.
        cpus: processors that each host has for itself, such as 0.5; None lets all share what there is. With a limit a
            host computes as fast while others wait for the network as while they compute.

    Raises:
        LabError: where namespaces (or limits) are not permitted or iproute2 is missing.
    """

    def __init__(self, rates: Sequence[int | None], cpus: float | None = None) -> None:
        self.rates = list(rates)
        self.key = f"nl{os.getpid()}"
        self.bridge = f"{self.key}b"
        self._running: list[subprocess.Popen[bytes]] = []
        self.limits = [] if cpus is None else [CpuLimit(self.host(index), cpus) for index in range(len(rates))]

    def host(self, index: int) -> str:
        """A host's namespace."""
        return f"{self.key}h{index}"

    def link(self, index: int) -> str:
        """The bridge's end of a host's cable."""
        return f"{self.key}v{index}"

    @staticmethod
    def address(index: int) -> str:
        return f"{SUBNET}.{index + 1}"

    def __enter__(self) -> Lab:
        check_permission()
        try:
            call("ip", "link", "add", self.bridge, "type", "bridge")
            call("ip", "link", "set", self.bridge, "up")
            for index, rate in enumerate(self.rates):
                self._add(index)
                self.shape(index, rate)
            for limit in self.limits:
                limit.make()
        except CpuLimitError as error:
            self.remove()
            raise LabError(f"--cpus-per-host: {error}") from error
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _add(self, index: int) -> None:
        host, link = self.host(index), self.link(index)
        call("ip", "netns", "add", host)
        call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host)
        call("ip", "link", "set", link, "master", self.bridge, "up")
        call("ip", "-n", host, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            call("ip", "-n", host, "link", "set", device, "up")
        call("ip", "-n", host, "route", "replace", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic")

    def shape(self, index: int, rate: int | None) -> None:
        """Gives a host's link another rate, also while something runs on it."""
        self.rates[index] = rate
        ends = (("-n", self.host(index)), "eth0"), ((), self.link(index))
        for where, device in ends:
            if rate is None:
                with contextlib.suppress(LabError):  # there was none
                    call("tc", *where, "qdisc", "del", "dev", device, "root")
                continue
            # A bucket of a millisecond: what a larger one lets through at once is no slow link for short messages.
            burst = max(rate // 8 // 1000, 2 * FRAME)
            limit = max(rate // 8 // 20, QUEUE)
            words = ("rate", f"{rate}bit", "burst", str(burst), "limit", str(limit))
            call("tc", *where, "qdisc", "replace", "dev", device, "root", "tbf", *words)

    def traffic(self) -> list[Traffic]:
        """The counters of every host's interface since it was made."""
        found = []
        for index in range(len(self.rates)):
            stats = json.loads(call("ip", "-n", self.host(index), "-j", "-s", "link", "show", "eth0"))[0]["stats64"]
            found.append(Traffic(stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return found

    def run(self, command: Sequence[str], ranks_per_host: int = 1, timeout: float | None = None) -> int:
        """Runs a Python command on all hosts under torchrun.

        Returns:
            0, or the exit status of the first host that failed; 124 after the time-out. The others are ended then.
        """
        started: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(len(self.rates)):
                started.append(self._start(index, command, ranks_per_host))
                self._running.append(started[-1])
            return _wait(started, timeout)
        finally:
            for process in started:
                _end(process)
                self._running.remove(process)

    def _start(self, index: int, command: Sequence[str], ranks_per_host: int) -> subprocess.Popen[bytes]:
        where = ["--nnodes", str(len(self.rates)), "--node-rank", str(index), "--nproc-per-node", str(ranks_per_host)]
        where += ["--master-addr", self.address(0), "--master-port", str(PORT)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *command]
        # Hosts have no names, which the rendezvous would warn of once for each connection.
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env = {**quiet, **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        words = ["ip", "netns", "exec", self.host(index), *torchrun]
        if self.limits:
            words = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.limits[index].members), *words]
        return subprocess.Popen(words, env=env, start_new_session=True)

    def remove(self) -> None:
        """Ends what runs on the hosts, in other threads too, and removes them and the bridge.

        What is gone already is left out. A second Ctrl-C does not stop this half-way.
        """
        with _undisturbed():
            for process in list(self._running):
                _end(process)
            _remove(self.key)
            for limit in self.limits:
                limit.remove()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_permission() -> None:
    """Raises a LabError that says what to do where hosts cannot be made."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(f"`{tool}` is missing: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise LabError("network namespaces need root: run it under sudo")
    probe = f"nl{os.getpid()}h"
    try:
        call("ip", "netns", "add", probe)
    except LabError as error:
        hint = "in a container, start it with --cap-add NET_ADMIN --cap-add SYS_ADMIN"
        raise LabError(f"network namespaces are not permitted here ({error}); {hint}") from error
    call("ip", "netns", "del", probe)


def _remove(key: str) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in re.findall(rf"^({key}h\d*)\b", listed, re.MULTILINE):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    links = subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True).stdout
    for name in re.findall(rf"^\d+: ({key}[bv]\d*)\b", links, re.MULTILINE):
        subprocess.run(["ip", "link", "del", name], capture_output=True)


def clean() -> list[str]:
    """Removes the laboratories of processes that are gone. Returns their keys."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    listed += subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True).stdout
    pids = {int(match[1]) for match in _NAME.finditer(listed)}
    dead = sorted(f"nl{pid}" for pid in pids if not os.path.exists(f"/proc/{pid}"))
    for key in dead:
        _remove(key)
        remove_limits(f"{key}h")
    return dead


def _wait(started: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> int:
    deadline = None if timeout is None else time.monotonic() + timeout
    failed: int | None = None
    while True:
        codes = [process.poll() for process in started]
        bad = next((code for code in codes if code), None)
        if bad is not None and failed is None:
            failed = bad if bad > 0 else 128 - bad
            limit = time.monotonic() + GRACE_SECONDS
            deadline = limit if deadline is None else min(deadline, limit)
        if all(code is not None for code in codes):
            return failed or 0
        if deadline is not None and time.monotonic() > deadline:
            return failed if failed is not None else 124
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a host's processes: asks, then kills, the whole session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores the signals that end a laboratory, in the main thread, where they arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Signals unwind like Ctrl-C, so that the hosts are removed; so does Ctrl-C where the shell had it ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(rates: Sequence[int | None], traffic: Sequence[Traffic], seconds: float) -> str:
    """What the interfaces counted, as a table."""
    lines = [f"{'host':>4}  {'link':>10}  {'sent MB':>10}  {'received MB':>11}  {'mean Mbit/s sent':>16}"]
    for index, (rate, own) in enumerate(zip(rates, traffic, strict=True)):
        mean = own.sent * 8 / max(seconds, 1e-9) / 1e6
        lines.append(
            f"{index:>4}  {describe(rate):>10}  {own.sent / 1e6:>10.2f}  {own.received / 1e6:>11.2f}  {mean:>16.1f}"
        )
    return "\n".join([*lines, f"in {seconds:.1f} s, launch included"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (4)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (1)")
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="[HOST=]RATE",
        help="of links, such as 100mbit; 0=1gbit for one host",
    )
    parser.add_argument(
        "--cpus-per-host",
        type=float,
        default=None,
        metavar="N",
        help="processors that each host has for itself, such as 0.5; all share what there is unless given",
    )
    parser.add_argument("--timeout", type=float, default=None, help="seconds after which the run is ended")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and a Python script with its arguments, or clean")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if command == ["clean"]:
            check_permission()
            print("\n".join(f"removed {key}" for key in clean()) or "nothing to remove")
            return 0
        if not command:
            parser.error("give the command after --, such as: -- pretrain_gpt.py --num-layers 4 ...")
        if not 1 <= options.hosts <= 200 or options.ranks_per_host < 1:
            raise LabError("--hosts must be 1 to 200, and --ranks-per-host at least 1")
        if options.cpus_per_host is not None and not 0.1 <= options.cpus_per_host <= 1024:
            raise LabError(f"--cpus-per-host {options.cpus_per_host:g}: must be at least 0.1")
        with interruptible(), Lab(parse_rates(options.rate, options.hosts), options.cpus_per_host) as lab:
            before, start = lab.traffic(), time.monotonic()
            status = lab.run(command, options.ranks_per_host, options.timeout)
            seconds = time.monotonic() - start
            counted = [now - then for now, then in zip(lab.traffic(), before, strict=True)]
            print(report(lab.rates, counted, seconds), flush=True)
        return status
    except LabError as error:
        print(f"netlab: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("netlab: interrupted; the hosts are removed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""Hosts as network namespaces on a bridge, with shaped links, and launched commands on them. Linux, root."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from benchmarks import REPO
from benchmarks.lab.cpu_limit import CpuLimit, CpuLimitError
from benchmarks.lab.removal import kill, remove
from megatron.base.start import ONE_TERMINAL
from megatron.data.interrupt import ignore_signals, interrupt_on_signals
from megatron.distributed.interfaces import SLOW_START

SUBNET = "10.77.0"
"""The same in every laboratory: a bridge without an address joins nothing but its own hosts."""
PORT = 29500
FRAME = 1514
"""Bytes of a full Ethernet frame."""
LOOPBACK_FRAME = 65550
"""Bytes of a full frame that a host sends to itself."""
QUEUE = 1 << 20
"""Minimum bytes queued at a link before any are dropped, like the buffer of a switch's port; faster links queue 50 ms.
With less, the end of a message's burst is lost until TCP notices."""
SEGMENT = 16000
"""Maximum bytes that TCP hands to a host's interface at once. Network cards split such segments into frames. Here, the
link's shaper splits what exceeds its bucket, and then sends frame by frame, which took 70% of two processors while four
hosts sent 66 Mb/s each; with segments of this size it is 13%."""
GRACE_SECONDS = 15.0
"""Time for the other hosts to notice that a host is gone."""
NCCL = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "1"}
NCCL_BUFFER = str(1 << 20)
"""Bytes of NCCL's buffer for each connection, in eight parts: a part of the usual 4 MiB takes 42 ms at 100 Mb/s, and
several ranks with many groups share one GPU's memory."""
_OWN_HOST = 'export NCCL_HOSTID="$0-$RANK" && exec "$@"'
"""A host identity for each rank: NCCL refuses two ranks of a host on a GPU, and would connect them past the link."""
END_SECONDS = 5.0
"""Time for hosts to end after SIGTERM, before they are killed."""


class LabError(Exception):
    """Raised when hosts cannot be created or used; the message is a single line."""


def call(*words: str) -> str:
    """Run a command of iproute2 and return its output.

    Raises:
        LabError: when it fails, with its message.
    """
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {result.stderr.strip() or result.returncode}")
    return result.stdout


@dataclass(frozen=True)
class Traffic:
    """The counters of a host's interface, in bytes."""

    sent: int
    received: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


class Lab:
    """Hosts on a bridge; a context manager that creates and removes them.

    Args:
        rates: bits per second of every host's link, in each direction; None leaves it unshaped.
        cpus: processors reserved for each host, such as 0.5; None lets all share the machine. With a limit, a host
            computes at the same speed whether others compute or wait.
        device: device of the ranks: cpu (gloo), or cuda: this machine's GPUs, NCCL over the hosts' links.
        inside: bits per second of a host's loopback; None leaves it unshaped.

    Raises:
        LabError: when namespaces (or limits) are not permitted or iproute2 is missing.
    """

    def __init__(
        self,
        rates: Sequence[int | None],
        cpus: float | None = None,
        device: str = "cpu",
        inside: int | None = None,
    ) -> None:
        self.rates = list(rates)
        self.device = device
        self.inside = inside
        self.key = f"nl{os.getpid()}"
        self.bridge = f"{self.key}b"
        self._running: list[subprocess.Popen[bytes]] = []
        self.limits = [] if cpus is None else [CpuLimit(self.host(index), cpus) for index in range(len(rates))]

    def host(self, index: int) -> str:
        return f"{self.key}h{index}"

    def link(self, index: int) -> str:
        """Return the bridge's end of a host's cable."""
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
                _shape(("-n", self.host(index)), "lo", self.inside, LOOPBACK_FRAME)
            for limit in self.limits:
                limit.create()
        except BaseException as error:
            with contextlib.suppress(LabError):  # the first error matters more
                self.remove()
            if isinstance(error, CpuLimitError):
                raise LabError(f"--cpus-per-host: {error}") from error
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
        for namespace, device in ((("-n", host), "eth0"), ((), link)):
            call("ip", *namespace, "link", "set", device, "gso_max_size", str(SEGMENT))
        try:  # as docs/guides/parallelism.md recommends for slow links
            call("ip", "netns", "exec", host, "sh", "-c", f"echo 0 > {SLOW_START}")
        except LabError:  # containers may have a read-only /proc/sys
            if index == 0:
                say(f"note: {SLOW_START} cannot be written here, so messages after pauses are slower")
        call("ip", "-n", host, "route", "replace", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic")

    def shape(self, index: int, rate: int | None) -> None:
        """Change the rate of a host's link, even while processes use it."""
        self.rates[index] = rate
        _shape(("-n", self.host(index)), "eth0", rate, FRAME)
        _shape((), self.link(index), rate, FRAME)

    def traffic(self) -> list[Traffic]:
        """Counters of every host's interface since it was made."""
        counters = []
        for index in range(len(self.rates)):
            stats = json.loads(call("ip", "-n", self.host(index), "-j", "-s", "link", "show", "eth0"))[0]["stats64"]
            counters.append(Traffic(stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return counters

    def run(self, command: Sequence[str], ranks_per_host: int = 1, timeout: float | None = None) -> int:
        """Run a Python command on all hosts under their launchers; return as ``run_each``."""
        hosts = range(len(self.rates))
        return self.run_each([(host, self.node(host, len(hosts), command, ranks_per_host)) for host in hosts], timeout)

    def run_each(self, commands: Sequence[tuple[int, Sequence[str]]], timeout: float | None = None) -> int:
        """Run Python on hosts, each with its own arguments.

        Args:
            commands: a host, and the words after Python's name; a host may have several.
            timeout: seconds after which they are ended.

        Returns:
            0, or the exit status of the first failed command; 124 after the timeout. The other commands are ended then.
        """
        started: list[tuple[int, subprocess.Popen[bytes]]] = []
        try:
            for host, words in commands:
                process = self._start(host, words)
                started.append((host, process))
                self._running.append(process)
            return self._wait(started, timeout)
        finally:
            _end([process for _, process in started])
            kill([self.host(host) for host in sorted({host for host, _ in started})])
            for _, process in started:
                self._running.remove(process)

    def node(self, number: int, nodes: int, command: Sequence[str], ranks: int) -> list[str]:
        """Return the words after Python's name that start a node's launcher, whose master is the first host."""
        launcher = [str(REPO / "tools" / "launch.py"), "--nnodes", str(nodes), "--node-rank", str(number)]
        launcher += ["--nproc-per-node", str(ranks), "--master-addr", self.address(0), "--master-port", str(PORT)]
        if self.device == "cuda":
            launcher += ["--no-python", "sh", "-c", _OWN_HOST, self.host(number), sys.executable, "-u"]
            command = ["-m" if word == "--module" else word for word in command[:1]] + list(command[1:])
        return [*launcher, *command]

    def _start(self, host: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
        # Hosts have no names; the rendezvous would warn about that once per connection.
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", ONE_TERMINAL: "1"}
        env = {**quiet, **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        if self.device == "cuda":
            env = {"NCCL_BUFFSIZE": NCCL_BUFFER, **env, **NCCL}
        command = ["ip", "netns", "exec", self.host(host), sys.executable, *words]
        if self.limits:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.limits[host].members), *command]
        return subprocess.Popen(command, env=env, start_new_session=True)

    def _wait(self, started: Sequence[tuple[int, subprocess.Popen[bytes]]], timeout: float | None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        failed: int | None = None
        while True:
            codes = [process.poll() for _, process in started]
            host, bad = next(((host, code) for (host, _), code in zip(started, codes, strict=True) if code), (0, None))
            if bad is not None and failed is None:
                failed = bad if bad > 0 else 128 - bad
                kill([self.host(host)])  # ranks that outlive their launcher would keep the others waiting
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if None in codes:
                    say(
                        f"host {host} ended with status {failed}; waiting up to "
                        f"{max(deadline - time.monotonic(), 0):.0f} s for the others"
                    )
            if None not in codes:
                return failed or 0
            if time.monotonic() > deadline:
                if failed is not None:
                    return failed
                say(f"timeout after {timeout:g} s")
                return 124
            time.sleep(0.1)

    def remove(self) -> None:
        """End the processes on the hosts, and remove the hosts and the bridge.

        Missing parts are skipped. A second Ctrl-C does not stop this half-way.

        Raises:
            LabError: when something could not be removed; the message names it.
        """
        with ignore_signals():
            _end(list(self._running))
            problems = remove(self.key)
        if problems:
            raise LabError(f"some parts remain; `netlab.py clean` tries again: {'; '.join(problems)}")


def check_permission() -> None:
    """Check that hosts can be created; raise a LabError with the fix if not."""
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


def say(text: str, name: str = "netlab") -> None:
    """Print a line of a program, apart from the output of its hosts."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def run_with_hosts(name: str, body: Callable[[], int]) -> int:
    """Run a program that creates hosts; return its exit status. Signals end it once the hosts are removed."""
    try:
        with interrupt_on_signals(even_ignored=True):
            return body()
    except (LabError, subprocess.SubprocessError) as error:
        say(f"error: {error}", name)
        return 1
    except KeyboardInterrupt:
        say("interrupted; the hosts are removed", name)
        return 130


def _shape(namespace: Sequence[str], device: str, rate: int | None, frame: int) -> None:
    """Give a device a rate in bits per second, or none; ``frame`` is the size of its full frames in bytes."""
    if rate is None:
        with contextlib.suppress(LabError):  # there was none
            call("tc", *namespace, "qdisc", "del", "dev", device, "root")
        return
    # A bucket of a millisecond, or of up to four if a segment then fits: a larger bucket would let short messages
    # through at once.
    per_ms = rate // 8 // 1000
    burst = max(per_ms, min(4 * per_ms, SEGMENT + frame), 2 * frame)
    limit = max(rate // 8 // 20, QUEUE)
    words = ("rate", f"{rate}bit", "burst", str(burst), "limit", str(limit))
    call("tc", *namespace, "qdisc", "replace", "dev", device, "root", "tbf", *words)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the launchers of all hosts at once: by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_SECONDS
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))

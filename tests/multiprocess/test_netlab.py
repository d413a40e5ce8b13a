"""The network laboratory: bytes, rates, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.lab import command as netlab
from benchmarks.lab import cpu_limit, removal
from benchmarks.lab.hosts import SEGMENT, Lab, call
from megatron.distributed.interfaces import SLOW_START
from tests.support.cleanup import have_ended
from tests.support.machines import require_laboratory
from tests.support.warm import INTERPRETER

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

REPO = Path(__file__).resolve().parents[2]

require_laboratory()

REDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1 << 20)
dist.all_reduce(x)
dist.barrier()
start = time.perf_counter()
dist.all_reduce(x)
seconds = time.perf_counter() - start
if dist.get_rank() == 0:
    print(f"seconds {seconds:.4f}", flush=True)
dist.destroy_process_group()
"""


NETLAB = """
import runpy, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tools"]
from benchmarks.lab import hosts
hosts.END_SECONDS = 1.0
sys.executable = {python!r}
runpy.run_path({repo!r} + "/tools/netlab.py", run_name="__main__")
"""
"""tools/netlab.py, which does not wait long for processes that ignore a signal."""


@contextmanager
def _started(
    tmp_path: Path, script: str, *arguments: str, python: str = INTERPRETER
) -> Iterator[subprocess.Popen[str]]:
    """A laboratory that is always removed after the test; its ranks are in its control groups.

    Args:
        tmp_path: folder of the script.
        script: text of a Python program.
        arguments: of the laboratory.
        python: what starts its launchers and ranks. Those of the forking Python are not in the control groups.
    """
    path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
    path.write_text(script)
    env = {**os.environ, "PYTHON_EXEC": python}
    program = NETLAB.format(repo=str(REPO), python=python)
    command = [INTERPRETER, "-c", program, *arguments, "--", str(path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            removal.remove(f"nl{process.pid}")


def _remains_of(pid: int) -> str:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    listed += subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True).stdout
    return " ".join(re.findall(rf"\bnl{pid}[bhv]\d*\b", listed))


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)


def test_ranks_on_cuda_have_separate_hosts_for_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each of two hosts: four hosts to NCCL, for the links alone. A module runs as a script."""
    (tmp_path / "tell.py").write_text(
        "import os, sys\n"
        "names = ('NCCL_HOSTID', 'NCCL_SOCKET_IFNAME', 'NCCL_IB_DISABLE', 'NCCL_BUFFSIZE')\n"
        f"open('{tmp_path}/' + sys.argv[1] + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in names))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with Lab([None, None], device="cuda") as lab:
        assert lab.run(["tell.py", "script"], 2, timeout=100) == 0
        monkeypatch.setenv("NCCL_BUFFSIZE", "2000000")
        assert lab.run(["--module", "tell", "module"], 2, timeout=100) == 0
        expected = [(f"{lab.host(rank // 2)}-{rank}", "=eth0", "1") for rank in range(4)]
    for how, buffer in (("script", str(1 << 20)), ("module", "2000000")):
        lines = [tuple((tmp_path / f"{how}{rank}").read_text().split()) for rank in range(4)]
        assert lines == [(*words, buffer) for words in expected]


def test_the_link_shapes_and_its_interface_counts(tmp_path: Path) -> None:
    """Two all-reduces of 4 MiB between two hosts at 50 Mbit/s: 8.4 MB each way, none of them faster than the link.

    The link counts a frame around every 1448 bytes, the counters a header for every segment, and acknowledgments.
    """
    arguments = ("--hosts", "2", "--rate", "50mbit", "--timeout", "100")
    with _started(tmp_path, REDUCE, *arguments, python=sys.executable) as lab:
        out, err = lab.communicate(timeout=120)
        remains = _remains_of(lab.pid)
    assert lab.returncode == 0, err
    seconds = float(re.findall(r"seconds ([\d.]+)", out)[0])
    limit = (1 << 20) * 32 / 50e6 * 1514 / 1448
    assert 0.85 * limit < seconds < 5 * limit  # other work may slow it
    for host in range(2):
        (row,) = re.findall(rf"^ +{host} +50mbit +([\d.]+) +([\d.]+)", out, re.MULTILINE)
        for megabytes in map(float, row):
            segments = 2 * (1 << 20) * 4 * (1 + 2 * 66 / SEGMENT)
            assert megabytes == pytest.approx(segments / 1e6, rel=0.03)
    assert remains == ""


@pytest.mark.parametrize("rate", [20_000_000, 60_000_000, 200_000_000])
def test_segments_fit_into_the_bucket_of_the_link(rate: int) -> None:
    """So that the shaper does not split them, unless the bucket would hold more than four milliseconds."""
    with Lab([rate, None]) as lab:
        for where in (["-n", lab.host(0), "link", "show", "eth0"], ["link", "show", lab.link(0)]):
            (device,) = json.loads(call("ip", "-d", "-j", *where))
            assert device["gso_max_size"] == SEGMENT
        assert call("ip", "netns", "exec", lab.host(0), "cat", str(SLOW_START)).strip() == "0"
        (bucket,) = re.findall(
            r"tbf .* burst (\d+)(K?)b", call("tc", "-n", lab.host(0), "qdisc", "show", "dev", "eth0")
        )
        nbytes = int(bucket[0]) * (1024 if bucket[1] else 1)
    if rate < 50_000_000:
        assert nbytes == pytest.approx(4e-3 * rate / 8, rel=0.1)
    else:
        assert SEGMENT < nbytes < max(1.1 * SEGMENT, 1.1e-3 * rate / 8) + 1514


def test_messages_of_a_host_to_itself_are_shaped_too(tmp_path: Path) -> None:
    """Two ranks of a host send 4 MiB each through a queue of 50 Mbit/s, and nothing by the link."""
    script = tmp_path / "reduce.py"
    program = REDUCE.replace("seconds = ", "dist.barrier()\nseconds = ")
    script.write_text(
        program.replace("print(", f"open({str(tmp_path / 'seconds')!r}, 'w').write(").replace(", flush=True", "")
    )
    with Lab([None], inside=50_000_000) as lab:
        assert lab.run([str(script)], 2, timeout=100) == 0
        assert lab.traffic()[0].sent < 100_000
    seconds = float((tmp_path / "seconds").read_text().split()[1])
    limit = 2 * (1 << 20) * 32 / 50e6
    assert 0.85 * limit < seconds < 5 * limit  # other work may slow it


REFUSE = f"""
import sys
sys.path.insert(0, {str(REPO)!r})
from megatron.base.errors import UserError
from megatron.training.program import run_program

def body(ranks):
    raise UserError("--lr: 'x' is not a number")

sys.exit(run_program(body))
"""


def test_a_command_that_fails_ends_the_laboratory_with_its_status(tmp_path: Path) -> None:
    with _started(tmp_path, "import os; os._exit(7)", "--hosts", "2", python=sys.executable) as lab:
        _, err = lab.communicate(timeout=120)
        assert lab.returncode == 7, err
        assert re.search(r"^error: rank \d \(process \d+\) ended with status 7$", err, re.MULTILINE), err
        assert _remains_of(lab.pid) == ""


def test_a_refused_command_prints_its_line_once(tmp_path: Path) -> None:
    """Besides the laboratory's own line, should the hosts not end at the same time."""
    with _started(tmp_path, REFUSE, "--hosts", "2", "--ranks-per-host", "2", python=sys.executable) as lab:
        _, err = lab.communicate(timeout=120)
    lines = [line for line in err.splitlines() if not line.startswith("netlab: host ")]
    assert (lab.returncode, lines) == (2, ["error: --lr: 'x' is not a number"])


SLEEP = """
import pathlib, signal, time, os
{}
pathlib.Path({!r}).write_text(str(os.getpid()))
while True:
    time.sleep(0.2)
"""
OBSTINATE = "signal.signal(signal.SIGTERM, lambda *_: print('saving first'))"


def test_two_at_once_and_interrupts(tmp_path: Path) -> None:
    """They do not meet, and each is removed by the signal that ends it, with the processes inside, whatever these do
    about a signal of their own."""
    marks = [tmp_path / "first.mark", tmp_path / "second.mark"]
    scripts = [SLEEP.format(first, str(mark)) for first, mark in zip((OBSTINATE, ""), marks, strict=True)]
    with ExitStack() as stack:
        labs = [
            stack.enter_context(_started(tmp_path, script, "--hosts", "1", "--rate", "1gbit")) for script in scripts
        ]
        for mark in marks:
            _wait_for(mark)
        time.sleep(0.2)
        inside = [int(mark.read_text()) for mark in marks]
        for number, lab in zip((signal.SIGINT, signal.SIGTERM), labs, strict=True):
            assert _remains_of(lab.pid) != ""
            lab.send_signal(number)
            _, err = lab.communicate(timeout=60)
            assert lab.returncode == 130, err
            assert "the hosts are removed" in err
            assert _remains_of(lab.pid) == ""
        assert have_ended(inside, 1.0)


def test_processes_of_another_thread_end_with_the_laboratory(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(300)\n"
    )
    folder = tmp_path / "ranks"
    folder.mkdir()
    with netlab.Lab([None, None]) as lab:
        thread = threading.Thread(target=lab.run, args=([str(script), str(folder)],), daemon=True)
        thread.start()
        for rank in ("0", "1"):
            _wait_for(folder / rank)
        time.sleep(0.2)
    thread.join(30)
    assert not thread.is_alive()
    assert have_ended((int(path.read_text()) for path in folder.iterdir()), 1.0)


def test_remains_of_a_killed_laboratory_are_cleaned(tmp_path: Path) -> None:
    mark = tmp_path / "killed.mark"
    with _started(tmp_path, SLEEP.format(OBSTINATE, str(mark)), "--hosts", "1") as lab:
        _wait_for(mark)
        time.sleep(0.2)
        lab.kill()
        lab.wait()
        assert _remains_of(lab.pid) != ""
        done = subprocess.run([INTERPRETER, str(REPO / "tools/netlab.py"), "clean"], capture_output=True, text=True)
        assert f"removed nl{lab.pid}\n" in done.stdout, done.stderr
        assert f"nl{lab.pid}h" not in done.stderr  # remains of others on this machine may stay
        lab.communicate(timeout=60)  # its processes have closed their output
        assert _remains_of(lab.pid) == ""
        assert have_ended([int(mark.read_text())], 1.0)


def test_control_groups_of_a_killed_laboratory_are_cleaned_without_its_namespaces() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    group = cpu_limit.CpuLimit(f"nl{ended.pid}h0", 0.5)
    try:
        group.create()
    except cpu_limit.CpuLimitError as problem:
        pytest.skip(str(problem))
    member = subprocess.Popen(["sleep", "600"])
    try:
        group.members.write_text(str(member.pid))
        removed, remaining = removal.clean()
        assert f"nl{ended.pid}" in removed
        assert not [line for line in remaining if f"nl{ended.pid}h" in line]
        assert member.wait(5) == -signal.SIGKILL
        assert not group.folder.exists()
    finally:
        member.kill()
        removal.remove(f"nl{ended.pid}")


def test_hosts_do_not_wait_long_for_a_failed_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host fails, by its rank or by its launcher, and leaves no rank; the other host would wait for ever."""
    mark = tmp_path / "mark"
    fail = "import os, signal\nif os.environ['GROUP_RANK'] == '1': "
    (tmp_path / "exit.py").write_text(f"{fail}os._exit(7)\n{SLEEP.format(OBSTINATE, str(mark))}")
    killed = f"{fail}os.kill(os.getppid(), signal.SIGKILL)\n{SLEEP.format('', str(mark))}"
    (tmp_path / "killed.py").write_text(killed)
    monkeypatch.setattr("benchmarks.lab.hosts.GRACE_SECONDS", 0.6)
    monkeypatch.setattr("benchmarks.lab.hosts.END_SECONDS", 0.5)
    with netlab.Lab([None, None]) as hosts:
        assert hosts.run([str(tmp_path / "exit.py")], timeout=0.1) == 124
        assert "netlab: timeout after 0.1 s" in capfd.readouterr().err
        for script, status in (("exit.py", 7), ("killed.py", 137)):
            if script == "killed.py":  # a rank's parent must be its launcher
                monkeypatch.delenv("PYTHON_EXEC")
                monkeypatch.setattr(sys, "executable", INTERPRETER)
            assert hosts.run([str(tmp_path / script)]) == status
            message = f"netlab: host 1 ended with status {status}; waiting up to 1 s for the others"
            assert message in capfd.readouterr().err
            for host in range(2):
                inside = subprocess.run(["ip", "netns", "pids", hosts.host(host)], capture_output=True, text=True)
                assert (inside.returncode, inside.stdout) == (0, "")


MEMBER = """
import os, pathlib, sys, torch, torch.distributed as dist
from megatron.training.program import run_program
from megatron.distributed.process_group import LaunchEnvironment

def body(ranks):
    ranks.join("gloo", 10.0, {}, peer_timeout_seconds=5.0)
    for step in range(10**9):
        dist.all_reduce(torch.ones(1000))
        if step == 100:
            pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))

raise SystemExit(run_program(body))
"""


def test_ranks_end_when_another_machine_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cable of the machine with rank 0, the store and the first launcher is pulled: no connection ends by that."""
    (tmp_path / "member.py").write_text(MEMBER)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    with netlab.Lab([None, None]) as lab:
        command = [str(tmp_path / "member.py"), str(tmp_path)]
        thread = threading.Thread(target=lab.run, args=(command,), kwargs={"ranks_per_host": 2}, daemon=True)
        thread.start()
        marks = [tmp_path / str(rank) for rank in range(4)]
        for mark in marks:
            _wait_for(mark)
        time.sleep(0.2)
        pids = [int(mark.read_text()) for mark in marks]
        subprocess.run(["ip", "link", "set", lab.link(0), "down"], check=True)
        assert have_ended(pids, 30.0)
    thread.join(30)
    err = capfd.readouterr().err
    name = re.escape(socket.gethostname())
    for remaining, lost in (("01", "23"), ("23", "01")):  # a launcher may end a host's other rank before it has spoken
        assert re.search(
            rf"rank [{remaining}]: ranks? [{lost}, ]+ on {name} stopped answering: no sign of life", err
        ), err


BUSY = """
import os, time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + 1:
    pass
print(f"share {time.process_time() - used:.3f} of {os.environ['RANK']}", flush=True)
"""


def test_hosts_have_their_own_processors(tmp_path: Path) -> None:
    """A quarter for each, although half of the machine would be idle; and the groups are gone afterwards."""
    with _started(tmp_path, BUSY, "--hosts", "2", "--cpus-per-host", "0.25") as process:
        out, err = process.communicate(timeout=200)
        groups = list(Path("/sys/fs/cgroup").glob(f"**/nl{process.pid}h*"))
    if "processors cannot be limited here" in err:
        pytest.skip(err.strip())
    assert process.returncode == 0, out + err
    shares = [float(share) for share in re.findall(r"share ([\d.]+) of", out)]
    assert len(shares) == 2
    assert all(0.02 < share < 0.4 for share in shares), shares
    assert not groups

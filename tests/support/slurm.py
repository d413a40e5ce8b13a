"""A Slurm of our own: several emulated nodes on this machine, started without root services and removed afterwards."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo", "squeue")
_START_SECONDS = 30.0


class NoSlurm(Exception):
    """Slurm is not installed, or not permitted; an installed Slurm that does not start is an error."""


class Slurm:
    """A context manager; ``env`` is the environment of its commands.

    Args:
        folder: of everything it writes.
        nodes: emulated nodes, n1 and so on, with 4 pretended GPUs each.

    Raises:
        NoSlurm: where it is not installed, or not permitted.
    """

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = nodes
        self.host = socket.gethostname().split(".")[0]
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        missing = [tool for tool in NEEDED if shutil.which(tool) is None]
        if missing:
            raise NoSlurm(f"{missing[0]} is missing: install slurm-wlm and munge")
        if os.geteuid() != 0:
            raise NoSlurm("slurmd needs root")
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _ports(self, count: int) -> list[int]:
        """Ports that are free now."""
        sockets = [socket.socket() for _ in range(count)]
        try:
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return [each.getsockname()[1] for each in sockets]
        finally:
            for each in sockets:
                each.close()

    def _start(self) -> None:
        munge = self.folder / "munge"
        for name in ("state", "log", "spool", "munge"):
            (self.folder / name).mkdir(parents=True)
        munge.chmod(0o711)
        for parent in self.folder.parents:  # munged wants to reach its socket as anyone
            if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
                parent.chmod(parent.stat().st_mode | 0o711)
        self.folder.chmod(0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": key, "socket": munge / "sock", "pid-file": munge / "pid"}
        files |= {"log-file": munge / "log", "seed-file": munge / "seed"}
        self._run("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        self._write_configuration()
        _until((munge / "sock").exists, self._logs)
        self._run("slurmctld", "-D", "-c")
        for number in range(1, self.nodes + 1):
            (self.folder / "spool" / f"n{number}").mkdir()
            self._run("slurmd", "-D", "-N", f"n{number}")
        _until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(self.nodes), self._logs)

    def _write_configuration(self) -> None:
        control, *daemons = self._ports(1 + self.nodes)
        lines = [
            "ClusterName=test", f"SlurmctldHost={self.host}(127.0.0.1)", f"SlurmctldPort={control}",
            "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge",
            f"AuthInfo=socket={self.folder / 'munge' / 'sock'}",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "SchedulerType=sched/backfill",
            "ReturnToService=2", "JobAcctGatherType=jobacct_gather/none", "SwitchType=switch/none",
            "AccountingStorageType=accounting_storage/none", "SlurmdParameters=config_overrides", "GresTypes=gpu",
            f"StateSaveLocation={self.folder / 'state'}", f"SlurmdSpoolDir={self.folder / 'spool'}/%n",
            f"SlurmctldPidFile={self.folder / 'slurmctld.pid'}", f"SlurmdPidFile={self.folder / 'slurmd.%n.pid'}",
            f"SlurmctldLogFile={self.folder / 'log' / 'slurmctld.log'}",
            f"SlurmdLogFile={self.folder / 'log' / 'slurmd.%n.log'}",
            "KillWait=5", "MinJobAge=300", "JobRequeue=1", "SchedulerParameters=bf_interval=1,sched_interval=1",
        ]  # fmt: skip
        for number, port in enumerate(daemons, 1):
            lines.append(
                f"NodeName=n{number} NodeHostname={self.host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 "
                "SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:4 State=UNKNOWN"
            )
        lines.append("PartitionName=batch Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=YES")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        gpus = [f"NodeName=n{number} Name=gpu File=/dev/tty[1-4]" for number in range(1, self.nodes + 1)]
        (self.folder / "gres.conf").write_text("\n".join(gpus) + "\n")

    def _run(self, *words: str) -> None:
        out = (self.folder / "log" / f"{words[0]}.out").open("ab")
        self._processes.append(subprocess.Popen(words, env=self.env, stdout=out, stderr=out))
        out.close()

    def _logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in (self.folder / "log").iterdir())

    def call(self, *words: str) -> str:
        """Output of a command; empty when it failed."""
        return subprocess.run(words, env=self.env, capture_output=True, text=True).stdout

    def submit(self, script: Path, options: Sequence[str], arguments: Sequence[str], env: Mapping[str, str]) -> int:
        """Submits a job from the repository's folder and returns its number.

        Raises:
            AssertionError: when it is refused.
        """
        words = ["sbatch", "--parsable", *options, str(script), *arguments]
        repo = Path(__file__).resolve().parents[2]
        done = subprocess.run(words, env={**self.env, **env}, capture_output=True, text=True, cwd=repo)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def field(self, job: int, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState; empty when the job is gone."""
        words = self.call("scontrol", "show", "job", str(job)).replace("\n", " ").split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def _stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _until(condition: Callable[[], bool], story: Callable[[], str]) -> None:
    """Waits for the start of something.

    Raises:
        RuntimeError: with the story, when that takes too long.
    """
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm did not start\n{story()}")
        time.sleep(0.2)

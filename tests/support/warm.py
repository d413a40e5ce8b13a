"""An interpreter for scripts of other languages: a command that runs Python programs in forks, as ``Forked`` does.

The command is a client of a server, which is a fork of the process that has torch imported. It hands over its standard
files, arguments, folder and environment, passes signals on, and ends as the program does; when it is killed, so is the
program, which is in its network and mount namespaces, but not in its session and control groups.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cleanup import die_with_parent
from tests.support.cli import REPO
from tests.support.forked import Forked, interpret

INTERPRETER = sys.executable
"""The real interpreter, even where a test replaces it."""

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
while words and words[0] == "-u":
    words.pop(0)
if not words or words[0].startswith("-") and words[0] not in ("-", "-c", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
socket.send_fds(link, [b"."], [0, 1, 2])
link.sendall(json.dumps([words, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
answers = link.makefile()
pid = int(answers.readline())
def forward(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended, and its code is on the way
        pass
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, forward)
code = int(answers.readline())
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):  # they have no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def warm_python() -> Iterator[str]:
    """The command, which works as long as the context is open; without pidfds the interpreter itself."""
    if not hasattr(os, "pidfd_open"):
        yield INTERPRETER
        return
    with tempfile.TemporaryDirectory(prefix="warm-") as name:  # a socket's name is short
        folder = Path(name)
        path, log, command = folder / "socket", folder / "log", folder / "python"
        command.write_text(CLIENT.format(python=INTERPRETER, path=str(path)))
        command.chmod(0o755)
        server = Forked(["-m", "tests.support.warm", str(path)], REPO, os.environ, log, log)
        try:
            while not path.exists():
                assert server.poll() is None, log.read_text()
                time.sleep(0.01)
            yield str(command)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()


def main() -> None:
    """Serves the clients of a socket, each in a process of its own."""
    path = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        Path(f"{path}.new").rename(path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os._exit(_serve(link))
            link.close()


def _serve(link: socket.socket) -> int:
    """Runs a client's program, and tells the client its process id and then its exit code."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, *_ = socket.recv_fds(link, 1, 3)
    words, folder, env = json.loads(link.makefile().readline())
    program = os.fork()
    if program == 0:
        _join_namespaces(link)
        link.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        interpret(words, folder, env)
    for file in files:
        os.close(file)
    link.sendall(f"{program}\n".encode())
    pidfd = os.pidfd_open(program)
    ready = select.select([pidfd, link.fileno()], [], [])[0]
    if pidfd not in ready:
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return 0


def _join_namespaces(link: socket.socket) -> None:
    """Enters the network and mount namespaces of a client."""
    client, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    for kind in ("net", "mnt"):
        theirs = f"/proc/{client}/ns/{kind}"
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{kind}"):
            continue
        with open(theirs) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {theirs}")


if __name__ == "__main__":
    main()

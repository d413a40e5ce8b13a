"""Options of the network laboratory, and its messages when hosts cannot be made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.lab import command as netlab
from benchmarks.lab import cpu_limit, hosts, removal
from benchmarks.lab.command import LabError, Traffic, format_rate, parse_rate, parse_rates


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 10**8), ("2.5gbit", 2_500_000_000), ("64kbit", 64_000), ("5000bit", 5000), ("none", None)],
)
def test_rates(text: str, bits: int | None) -> None:
    assert parse_rate(text) == bits
    assert parse_rate(format_rate(bits)) == bits if bits else format_rate(bits) == "unshaped"


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mb", "-1mbit", "0gbit", "1bit", "²gbit", f"{'9' * 400}gbit", "601gbit"]
)
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="--rate"):
        parse_rate(text)


def test_a_host_may_have_another_rate() -> None:
    assert parse_rates(["1gbit", "2=100mbit"], 3) == [10**9, 10**9, 10**8]
    assert parse_rates([], 2) == [None, None]
    for word in ("3=1gbit", "x=1gbit", "-1=1gbit", "²=1gbit", f"{'9' * 5000}=1gbit", "=1gbit"):
        with pytest.raises(LabError, match="hosts 0 to 2"):
            parse_rates([word], 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--timeout nan -- s.py", "--timeout nan: must be a number of seconds above 0"),
        ("--timeout -1 -- s.py", "--timeout -1: must be a number of seconds above 0"),
        ("--cpus-per-host 5000 -- s.py", "--cpus-per-host 5000: must be 0.1 to 1024"),
        ("--cpus-per-host nan -- s.py", "--cpus-per-host nan: must be 0.1 to 1024"),
        ("--rate 99999999999999999gbit -- s.py", "1kbit to 600gbit"),
        ("--device cuda -- s.py", "--device cuda: torch sees no CUDA device; leave it out to train over gloo"),
        ("--hosts 3 -- clean", "clean: there is no such Python script"),
        ("clean foo", "`clean` takes no arguments"),
        ("--hosts 2 -- nope.py --lr 1", "nope.py: there is no such Python script"),
        ("-- folder", "folder: there is no such Python script"),
        (f"-- {'a' * 5000}.py", "there is no such Python script"),
        ("-- -m nope.main", "-m nope.main: there is no such module in"),
        ("-- -m folder.nope.main", "-m folder.nope.main: there is no such module in"),
        ("-- -m s.main", "-m s.main: there is no such module in"),
        ("-- -m .main", "-m .main: there is no such module in"),
        ("-- -m __main__", "-m __main__: there is no such module in"),
        ("-- -m", "give a Python script or -m MODULE"),
        ("-- --lr 1", "give a Python script or -m MODULE"),
        ("--", "give a Python script or -m MODULE"),
    ],
)
def test_an_invalid_command_is_refused_in_a_line_before_hosts_are_made(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make(*arguments: object) -> None:
        raise AssertionError("hosts were made, or removed")

    (tmp_path / "s.py").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(netlab.Lab, "__enter__", make)
    monkeypatch.setattr(netlab, "clean", make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["netlab.py", *words.split()])
    assert netlab.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("netlab: error: ")
    assert message in line


def test_existing_scripts_folders_and_modules_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("clean", "package/__main__.py", "package/x.py", "module.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    for words in (["clean"], ["package"], ["-m", "module"], ["-m", "package.x"], ["--module", "json.tool", "-"]):
        assert netlab.check_command(["--", *words]) == words
        assert netlab.check_command(words) == words


def test_the_message_without_permission_has_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(LabError, match="install iproute2"):
        hosts.check_permission()
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="sudo"):
        hosts.check_permission()
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)

    def refuse(*words: str) -> str:
        raise LabError("Operation not permitted")

    monkeypatch.setattr(hosts, "call", refuse)
    with pytest.raises(LabError, match="--cap-add NET_ADMIN"):
        hosts.check_permission()


def test_remaining_parts_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A control group is all that is left of a killed laboratory; rmdir refuses it."""
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its status remains unread
    groups = tmp_path / "cpu"
    for owner, content in ((ended.pid, "h1/tasks"), (os.getpid(), "h0/tasks")):
        path = groups / f"nl{owner}{content}"
        path.parent.mkdir(parents=True)
        path.touch()
    (groups / f"nl{ended.pid}h0").mkdir()
    monkeypatch.setattr(cpu_limit, "ROOT", tmp_path)
    monkeypatch.setattr(cpu_limit, "_REMOVAL_SECONDS", 0.1)
    monkeypatch.setattr(removal, "_run_ip", lambda *words: "")
    monkeypatch.setattr(netlab, "check_permission", lambda: None)
    monkeypatch.setattr(sys, "argv", ["netlab.py", "clean"])
    assert netlab.main() == 1
    ended.wait()
    captured = capsys.readouterr()
    assert captured.err == f"netlab: error: {groups}/nl{ended.pid}h1: Directory not empty\n"
    assert sorted(path.name for path in groups.iterdir()) == sorted([f"nl{ended.pid}h1", f"nl{os.getpid()}h0"])


def test_the_report() -> None:
    text = netlab.report([10**8, None], [Traffic(25_000_000, 5), Traffic(0, 0)], 2.0)
    assert "100mbit" in text
    assert "unshaped" in text
    assert "100.0" in text

#!/usr/bin/env python3
"""Set up the environment for the Makefile's commands, then run a Python command in it.

    python3 tools/setup_env.py [--extras test,lint] [--oracle] [-- PYTHON_ARGUMENTS ...]

An installed torch in the supported range is used as it is:

- an active virtual environment with such a torch (or PYTHON=/path/to/its/python) is used directly;
- a system or conda Python with such a torch gets a ``.venv`` that sees the system's packages;
- otherwise ``.venv`` is created from the first usable Python, and torch is installed into it.

torch is never replaced: later installations are constrained to its version. An environment outside this checkout in
which another checkout is installed (``pip install -e``) is refused, since its commands would then run this checkout's
code. A second call finds its stamp and has nothing to do. Standard library only; a Python too old to train with can run
this script, which then looks for another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

REPO = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = (3, 10), (3, 13)
STAMP = ".megatron-cc-setup.json"
"""File in the environment that says what is installed there."""
ORACLES = {"megatron-core==0.16.1": "MEGATRON_CORE_ORACLE", "transformers==4.17.0": "TRANSFORMERS_ORACLE"}
"""Reference packages for tests -> environment variable for the package's folder."""

PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
try:
    torch = m.version("torch") if u.find_spec("torch") else None
except m.PackageNotFoundError:
    torch = None
origins = [d.read_text("direct_url.json") for d in m.distributions(name="megatron-cc")]
print(json.dumps({
    "executable": sys.executable, "version": sys.version_info[:2], "prefix": sys.prefix,
    "base_prefix": sys.base_prefix, "torch": torch,
    "is_venv": sys.prefix != sys.base_prefix,
    "has_venv": bool(u.find_spec("venv")), "has_ensurepip": bool(u.find_spec("ensurepip")),
    "has_pip": bool(u.find_spec("pip")),
    "origin": next(filter(None, origins), None),
}))
"""


class SetupError(Exception):
    """The environment cannot be set up; the message says what the user has to do."""


class Interpreter:
    """A Python and what it reports about itself."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.executable: str = facts["executable"]
        self.version: tuple[int, int] = tuple(facts["version"])
        self.prefix: str = facts["prefix"]
        self.base_prefix: str = facts["base_prefix"]
        self.torch: str | None = facts["torch"]
        self.is_venv: bool = facts["is_venv"]
        self.can_make_venv: bool = facts["has_venv"] and (facts["has_ensurepip"] or facts["has_pip"])
        self.has_ensurepip: bool = facts["has_ensurepip"]
        self.origin: str | None = facts["origin"]
        """pip's record of where the installed Megatron-CC comes from, in JSON."""

    @property
    def has_suitable_torch(self) -> bool:
        return self.torch is not None and in_torch_range(self.torch)

    def __str__(self) -> str:
        return f"Python {self.version[0]}.{self.version[1]} ({self.executable})"


def say(text: str) -> None:
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def probe(command: str) -> Interpreter | None:
    """Ask a Python about itself; None if it does not run or is older than 3.8."""
    path = shutil.which(command)
    if path is None:
        return None
    try:
        result = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60, cwd="/")
        return Interpreter(json.loads(result.stdout)) if result.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def torch_requirement() -> str:
    """Return the torch requirement of pyproject.toml, as ``torch>=A,<B``."""
    ranges = re.findall(r'"(torch\s*>=[\d.]+,\s*<[\d.]+)"', (REPO / "pyproject.toml").read_text())
    if len(set(ranges)) != 1:
        raise SetupError(f"pyproject.toml must give torch the same range everywhere, found {ranges}")
    return ranges[0]


def in_torch_range(version: str) -> bool:
    """Check that a version is in the declared range; as in pip, a pre-release of its lower end is not."""
    low, high = (_numbers(v) for v in re.findall(r"[\d.]+\d", torch_requirement()))
    public = version.split("+")[0]
    is_final = re.fullmatch(r"[\d.]+(\.post\d+)?", public) is not None
    numbers = _numbers(public)
    return low <= numbers < high and (is_final or numbers[: len(low)] > low)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match.group().split(".")) if match else ()


def choose_base() -> Interpreter:
    """Choose the base Python: that of $PYTHON, else one with a suitable torch, else the first that can create a venv.

    Raises:
        SetupError: if there is none.
    """
    if requested := os.environ.get("PYTHON"):
        python = probe(requested)
        if python is None or python.version < OLDEST:
            raise SetupError(f"PYTHON={requested} is not a Python of at least {OLDEST[0]}.{OLDEST[1]}")
        return python
    names = ["python3", "python"] + [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    pythons = [python for name in names if (python := probe(name)) is not None]
    usable = [python for python in pythons if python.version >= OLDEST]
    suitable = [python for python in usable if python.has_suitable_torch]
    makers = [python for python in usable if python.can_make_venv]
    tested = [python for python in makers if python.version <= NEWEST]
    for group in (suitable, tested, makers):
        if group:
            return group[0]
    if usable:
        raise SetupError(f"{usable[0]} cannot create virtual environments: install its venv package (python3-venv)")
    versions = ", ".join(sorted(set(map(str, pythons)))) or "none"
    raise SetupError(f"needs Python 3.10 to 3.13, found {versions}: install one, or set PYTHON=/path/to/python")


def make_environment() -> Interpreter:
    """Return the environment's Python; create ``.venv`` if needed."""
    venv = probe(str(REPO / ".venv" / "bin" / "python"))
    venv = venv if venv is not None and venv.is_venv else None
    if not os.environ.get("PYTHON"):
        active = probe("python3")
        if active is not None and active.is_venv and active.has_suitable_torch:
            return active
        if venv is not None:
            return venv
    base = choose_base()
    if base.is_venv and base.has_suitable_torch:
        return base
    same_base = venv is not None and venv.base_prefix == base.base_prefix
    if venv is not None and same_base and (not base.has_suitable_torch or venv.torch == base.torch):
        return venv
    return _make_venv(base)


def _make_venv(base: Interpreter) -> Interpreter:
    if not base.can_make_venv:
        raise SetupError(f"{base} cannot create virtual environments: install its venv package (python3-venv)")
    if base.version > NEWEST:
        say(f"{base} is newer than the newest tested version ({NEWEST[0]}.{NEWEST[1]})")
    folder = REPO / ".venv"
    share = base.has_suitable_torch
    say(f"creating .venv from {base}" + (f", with its torch {base.torch}" if share else ""))
    command = [base.executable, "-m", "venv", "--clear"]
    command += ["--system-site-packages"] if share else []
    command += [] if base.has_ensurepip else ["--without-pip"]
    run([*command, str(folder)], "cannot create .venv")
    venv = probe(str(folder / "bin" / "python"))
    if venv is None:
        raise SetupError("the Python of the new .venv does not run: remove .venv and try again")
    if not base.has_ensurepip:
        pip = [base.executable, "-m", "pip", "--python", venv.executable, "install", "pip"]
        run(pip, "cannot install pip into .venv")
    return venv


def run(command: list[str], failure: str) -> None:
    """Run a command; show its output only if it fails.

    Raises:
        SetupError: with ``failure`` and the last lines of output.
    """
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPO)
    if result.returncode != 0:
        tail = "\n".join(result.stdout.rstrip().splitlines()[-15:])
        raise SetupError(f"{failure}: `{' '.join(command)}` failed:\n{tail}")


def pip_install(python: Interpreter, arguments: list[str], failure: str) -> None:
    command = [python.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*command, *arguments], failure)


def expected_stamp(python: Interpreter) -> dict[str, Any]:
    kernels = sorted(path for path in (REPO / "megatron/kernels/csrc").rglob("*") if path.is_file())
    text = "".join(path.read_text() for path in (REPO / "pyproject.toml", REPO / "setup.py", *kernels))
    return {"project": hashlib.sha256(text.encode()).hexdigest(), "repo": str(REPO), "torch": python.torch}


def find_other_checkout(python: Interpreter) -> Path | None:
    """Find the other checkout whose code an environment runs; None for an environment that this one may be
    installed into: one of its own, without Megatron-CC, or with that of a folder which is gone."""
    try:
        origin = json.loads(python.origin or "{}")
        is_editable, url = origin.get("dir_info", {}).get("editable", False), urlsplit(origin.get("url", ""))
    except (ValueError, AttributeError):
        return None
    checkout = Path(url2pathname(url.path))
    is_other = url.scheme == "file" and (checkout / "pyproject.toml").is_file() and checkout.resolve() != REPO
    return checkout if is_editable and is_other and REPO not in Path(python.prefix).resolve().parents else None


def install(python: Interpreter, extras: set[str]) -> None:
    """Install torch if missing, then the project and its dependencies; do nothing if all are installed.

    Raises:
        SetupError: when something cannot be installed, or the environment runs another checkout's code.
    """
    if other := find_other_checkout(python):
        raise SetupError(
            f"{python.prefix} runs the code of {other}, and would run this checkout's code instead; leave PYTHON out, "
            f"or deactivate the environment, to use {REPO / '.venv'}; or first: {python.executable} -m pip uninstall "
            "megatron-cc"
        )
    stamp_path, stamp = Path(python.prefix) / STAMP, {}
    with suppress(OSError, ValueError):
        stamp = json.loads(stamp_path.read_text())
    expected = expected_stamp(python)
    installed_extras = set(stamp.get("extras", ()))
    current = {name: stamp.get(name) for name in expected} == expected
    if current and extras <= installed_extras and python.has_suitable_torch:
        return
    extras |= installed_extras if current else set()
    start = time.monotonic()
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("c++") is None:
        say("no C++ compiler found; the compiled kernels are optional")
    build_tools = ["setuptools>=77", "wheel", "ninja"]
    if python.has_suitable_torch:
        say(f"using torch {python.torch} as it is")
        pip_install(python, build_tools, "cannot install the build tools")
    else:
        say(f"installing {torch_requirement()} (the largest download)")
        pip_install(python, [*build_tools, torch_requirement()], "cannot install torch")
        python.torch = require_probe(python).torch
    say("installing Megatron-CC and its dependencies" + (f" for {', '.join(sorted(extras))}" if extras else ""))
    constraints = Path(python.prefix) / ".megatron-cc-constraints.txt"
    constraints.write_text(f"torch=={python.torch}\n")
    target = ".[" + ",".join(sorted(extras)) + "]" if extras else "."
    arguments = ["--no-build-isolation", "--constraint", str(constraints), "--editable", target]
    pip_install(python, arguments, "cannot install Megatron-CC")
    stamp_path.write_text(json.dumps({**expected_stamp(python), "extras": sorted(extras)}))
    say(f"ready after {time.monotonic() - start:.0f} s: {python}, torch {python.torch}")


def require_probe(python: Interpreter) -> Interpreter:
    again = probe(python.executable)
    if again is None or again.torch is None:
        raise SetupError(f"torch was installed but {python} does not find it: remove .venv and try again")
    return again


def oracle_folder(python: Interpreter, package: str) -> Path:
    return Path(python.prefix) / "oracles" / package.replace("==", "-")


def install_oracles(python: Interpreter) -> None:
    """Install each reference package into a separate folder; without it, the tests that compare with it are skipped."""
    for package in ORACLES:
        folder = oracle_folder(python, package)
        if (folder / ".complete").exists():
            continue
        say(f"fetching {package}, a reference for tests")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            pip_install(python, ["--no-deps", "--target", str(folder), package], f"cannot install {package}")
        except SetupError as error:
            shutil.rmtree(folder, ignore_errors=True)
            say(f"{str(error).splitlines()[0]}; the tests that compare with it will be skipped")
            continue
        (folder / ".complete").touch()


def environment(python: Interpreter) -> dict[str, str]:
    """Return the command's variables: the environment's programs come first in PATH, and the references are named."""
    env = dict(os.environ)
    env["PATH"] = str(Path(python.executable).parent) + os.pathsep + env.get("PATH", "")
    for package, variable in ORACLES.items():
        if (oracle_folder(python, package) / ".complete").exists():
            env.setdefault(variable, str(oracle_folder(python, package)))
    return env


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--extras", default="", help="comma-separated: cleaning, docs, evaluation, server, tasks, test, lint (none)"
    )
    parser.add_argument("--oracle", action="store_true", help=f"also fetch {' and '.join(ORACLES)} for tests")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="--, then the arguments of the Python to run")
    args = parser.parse_args()
    try:
        python = make_environment()
        install(python, {extra for extra in args.extras.split(",") if extra})
        if args.oracle:
            install_oracles(python)
    except (SetupError, OSError) as error:
        say(f"error: {error}")
        return 1
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if command:
        os.execve(python.executable, [python.executable, *command], environment(python))
    return 0


if __name__ == "__main__":
    sys.exit(main())

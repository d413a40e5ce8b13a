"""Commands: those of an installed package, and those of a clone, answer --help in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.support.cli import REPO

pytestmark = pytest.mark.slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPTS: dict[str, str] = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
PROGRAMS = [REPO / f"{name}.py" for name in ("pretrain_gpt", "pretrain_bert", "pretrain_t5", "val_check_gpt")]
PROGRAMS += sorted(
    path
    for folder in ("ASPLOS23", "tasks", "tools", "tools/downloads", "tools/openwebtext")
    for path in (REPO / folder).glob("*.py")
    if "import start_program\n" in path.read_text()
)
BENCHMARKS = [
    ".".join(path.relative_to(REPO).with_suffix("").parts)
    for path in sorted((REPO / "benchmarks").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and "ArgumentParser(" in path.read_text()
]

ASK_ALL = """
import contextlib, io, json, runpy, sys
from importlib.metadata import EntryPoint
from pathlib import Path

def script(name, target):
    sys.exit(EntryPoint(name, target, "console_scripts").load()())

def program(name, _):
    if not name.endswith(".py"):
        return runpy.run_module(name, run_name="__main__")
    sys.path.insert(0, str(Path(name).parent))  # as Python does
    sys.modules.pop("_clone", None)  # of another folder
    runpy.run_path(name, run_name="__main__")

found, path = {}, list(sys.path)
for name, target in json.loads(sys.argv[1]).items():
    sys.argv, sys.path[:] = [name, "--help"], path
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            (script if target else program)(name, target)
    except SystemExit as ended:
        found[name] = [ended.code or 0, out.getvalue(), sys.path[:2]]
print(json.dumps(found))
"""


def _help_outputs(
    commands: dict[str, str], folder: Path, variables: dict[str, str]
) -> dict[str, tuple[int, str, list[str]]]:
    """Status, output and search path of each command's --help, all of them in a single process."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    words = [*command, "-c", ASK_ALL, json.dumps(commands)]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    outputs: dict[str, tuple[int, str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return outputs


def test_console_scripts_have_help(tmp_path: Path) -> None:
    assert "megatron-cc-train" in SCRIPTS
    outputs = _help_outputs(SCRIPTS, tmp_path, {"PYTHONPATH": str(REPO)})
    assert set(outputs) == set(SCRIPTS)
    for name, (status, text, _) in outputs.items():
        assert (status, text[:6]) == (0, "usage:"), name


def test_programs_find_the_package_from_any_folder(tmp_path: Path) -> None:
    assert len(PROGRAMS) > 25
    outputs = _help_outputs({str(path): "" for path in PROGRAMS}, tmp_path, {})
    assert set(outputs) == {str(path) for path in PROGRAMS}
    for name, (status, text, path) in outputs.items():
        assert (status, text[:6]) == (0, "usage:"), name
        assert str(REPO) in path, f"{name} finds the package because another one did"


def test_benchmarks_have_help() -> None:
    assert "benchmarks.convergence" in BENCHMARKS
    assert len(BENCHMARKS) >= 10
    outputs = _help_outputs(dict.fromkeys(BENCHMARKS, ""), REPO, {"PYTHONPATH": str(REPO)})
    assert set(outputs) == set(BENCHMARKS)
    for name, (status, text, _) in outputs.items():
        assert (status, text[:6]) == (0, "usage:"), name


@pytest.mark.parametrize("name", SCRIPTS)
def test_console_scripts_are_in_the_wheel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules outside the packages that setuptools knows would be missing there."""
    entry = EntryPoint(name, SCRIPTS[name], "console_scripts")
    names = [entry.module]
    if entry.module == "megatron.base.start":
        monkeypatch.setattr("megatron.base.start.start_program", lambda name, **options: names.append(name))
        entry.load()()
    else:
        assert entry.attr == "main"
    module = REPO / names[-1].replace(".", "/")
    assert "def main(" in module.with_suffix(".py").read_text()
    assert names[-1].startswith("megatron.")
    for folder in module.parents:
        if folder == REPO:
            break
        assert (folder / "__init__.py").is_file()

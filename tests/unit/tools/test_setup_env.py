"""The set-up's decisions: Python, torch, and repeated steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from urllib.parse import quote
from venv import EnvBuilder

import pytest

from tools import setup_env
from tools.setup_env import Interpreter, SetupError, choose_base, in_torch_range, make_environment, probe

REPO = Path(__file__).resolve().parents[3]


def interpreter(**changes: Any) -> Interpreter:
    facts: dict[str, Any] = {"executable": "/usr/bin/python3", "prefix": "/usr", "base_prefix": "/usr"}
    facts |= {
        "version": (3, 11),
        "torch": None,
        "is_venv": False,
        "has_venv": True,
        "has_ensurepip": True,
        "has_pip": True,
        "origin": None,
    }
    return Interpreter({**facts, **changes})


@pytest.fixture
def pythons(monkeypatch: pytest.MonkeyPatch) -> dict[str, Interpreter]:
    """The available commands, and a `.venv` that is created by recording its base Python."""
    interpreters: dict[str, Interpreter] = {}

    def make(base: Interpreter) -> Interpreter:
        return interpreter(executable=f"made from {base.executable}", is_venv=True, torch=base.torch)

    monkeypatch.setattr(setup_env, "probe", interpreters.get)
    monkeypatch.setattr(setup_env, "_make_venv", make)
    monkeypatch.delenv("PYTHON", raising=False)
    return interpreters


VENV_PYTHON = str(REPO / ".venv" / "bin" / "python")


def test_probe_describes_this_python() -> None:
    me = probe(sys.executable)
    assert me is not None
    assert me.version == sys.version_info[:2]
    assert me.has_suitable_torch
    assert me.is_venv == (sys.prefix != sys.base_prefix)
    assert probe("no-such-python") is None
    assert probe("false") is None


def test_torch_range() -> None:
    versions = ["2.11.0", "2.11.0+cu128", "2.13.1+cpu", "2.13.0.post1", "2.12.0a0+gitabc"]
    assert [version for version in versions if not in_torch_range(version)] == []
    outside = ["2.11.0a0+gitabc", "2.10.1", "2.14.0", "2.9", "3.0.0"]
    assert [version for version in outside if in_torch_range(version)] == []


def test_an_active_environment_with_torch_is_used_itself(pythons: dict[str, Interpreter]) -> None:
    active = interpreter(executable="/env/bin/python", is_venv=True, torch="2.12.0+cu130")
    pythons |= {"python3": active, VENV_PYTHON: interpreter(is_venv=True, torch="2.13.0")}
    assert make_environment() is active


def test_an_active_environment_with_another_torch_is_left_alone(pythons: dict[str, Interpreter]) -> None:
    pythons["python3"] = interpreter(executable="/env/bin/python", is_venv=True, torch="2.5.0")
    assert make_environment().executable == "made from /env/bin/python"


def test_a_system_python_with_torch_is_preferred(pythons: dict[str, Interpreter]) -> None:
    pythons["python3"] = interpreter(executable="new", version=(3, 13))
    pythons["python3.12"] = interpreter(executable="has torch", version=(3, 12), torch="2.11.0")
    assert make_environment().executable == "made from has torch"


def test_an_existing_environment_is_kept(pythons: dict[str, Interpreter]) -> None:
    venv = interpreter(executable=VENV_PYTHON, is_venv=True)
    pythons |= {"python3": interpreter(), VENV_PYTHON: venv}
    assert make_environment() is venv


def test_an_old_python_is_skipped(pythons: dict[str, Interpreter]) -> None:
    pythons["python3"] = interpreter(executable="old", version=(3, 8))
    with pytest.raises(SetupError, match=r"needs Python 3.10 to 3.13, found Python 3.8 \(old\)"):
        choose_base()
    pythons["python3.14"] = interpreter(executable="not looked for", version=(3, 14))
    pythons["python"] = interpreter(executable="untested", version=(3, 14))
    assert choose_base().executable == "untested"
    pythons["python3.10"] = interpreter(executable="good", version=(3, 10))
    assert choose_base().executable == "good"


def test_the_requested_python_is_used(pythons: dict[str, Interpreter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "/mine")
    with pytest.raises(SetupError, match="PYTHON=/mine is not a Python"):
        make_environment()
    pythons |= {"/mine": interpreter(executable="/mine"), "python3": interpreter()}
    assert make_environment().executable == "made from /mine"
    venv = interpreter(executable=VENV_PYTHON, is_venv=True)
    pythons[VENV_PYTHON] = venv
    assert make_environment() is venv  # it was created from the same Python
    pythons["/mine"] = interpreter(executable="/mine", torch="2.11.0")
    assert make_environment().executable == "made from /mine"  # the old environment does not see this torch
    pythons["/mine"] = interpreter(executable="/mine", torch="2.11.0", is_venv=True)
    assert make_environment() is pythons["/mine"]


class Recorder:
    """Stand-in for pip that records its arguments; installing torch makes it appear."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[str]] = []
        monkeypatch.setattr(setup_env, "pip_install", self)
        monkeypatch.setattr(setup_env, "require_probe", lambda python: interpreter(torch="2.13.0+cpu"))

    def __call__(self, python: Interpreter, arguments: list[str], failure: str) -> None:
        self.calls.append(arguments)


def test_torch_is_installed_only_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Recorder(monkeypatch)
    setup_env.install(interpreter(prefix=str(tmp_path), torch="2.11.0+cu128"), set())
    assert not any(argument.startswith("torch") for call in pip.calls for argument in call)
    assert (tmp_path / ".megatron-cc-constraints.txt").read_text() == "torch==2.11.0+cu128\n"
    assert "--no-build-isolation" in pip.calls[-1]


def test_a_second_call_installs_nothing_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Recorder(monkeypatch)
    setup_env.install(interpreter(prefix=str(tmp_path)), {"test"})
    assert any("torch>=" in argument for argument in pip.calls[0])
    python = interpreter(prefix=str(tmp_path), torch="2.13.0+cpu")

    def installs(extras: set[str]) -> list[str]:
        pip.calls.clear()
        setup_env.install(python, extras)
        return [call[-1] for call in pip.calls[-1:]]

    assert installs(set()) == []
    assert installs({"test"}) == []
    assert installs({"lint"}) == [".[lint,test]"]
    assert installs({"test", "lint"}) == []
    stamp = tmp_path / setup_env.STAMP
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "project": "older"}))
    assert installs({"lint"}) == [".[lint]"]
    stamp.write_text("{")
    assert installs({"lint"}) == [".[lint]"]


def _origin(folder: Path, editable: bool = True, scheme: str = "file") -> str:
    """pip's record of an installation from a folder, which becomes a checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder != REPO:
        (folder / "pyproject.toml").touch()
    return json.dumps({"dir_info": {"editable": editable}, "url": f"{scheme}://{quote(str(folder))}"})


def test_an_environment_of_another_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands would run the code of this checkout from then on, even if a stamp says that all is installed."""
    pip, other = Recorder(monkeypatch), tmp_path / "another checkout"
    facts = {"prefix": str(tmp_path), "torch": "2.13.0+cpu", "executable": "/env/bin/python"}
    setup_env.install(interpreter(**facts), set())
    pip.calls.clear()
    for extras in (set(), {"test"}):
        with pytest.raises(SetupError) as error:
            setup_env.install(interpreter(**facts, origin=_origin(other)), extras)
        assert str(error.value).startswith(f"{tmp_path} runs the code of {other}, ")
        assert str(error.value).endswith("/env/bin/python -m pip uninstall megatron-cc")
        assert "\n" not in str(error.value)
    assert pip.calls == []


def test_an_environment_without_another_checkout_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, gone = _origin(tmp_path / "other"), _origin(tmp_path / "gone")
    (tmp_path / "gone" / "pyproject.toml").unlink()
    own_folder = str(REPO / ".venv")
    copy_of_own = interpreter(prefix=own_folder, origin=other)  # a copied checkout
    accepted = [None, gone, _origin(REPO), "{}", "[]", "no JSON", '{"url": "https://example.org/x.whl"}']
    accepted += [_origin(tmp_path / "other", editable=False), _origin(tmp_path / "other", scheme="ssh")]
    pythons = [copy_of_own, *(interpreter(prefix="/env", origin=origin) for origin in accepted)]
    assert [python.origin for python in pythons if setup_env.find_other_checkout(python)] == []
    assert setup_env.find_other_checkout(interpreter(prefix="/env", origin=other)) == tmp_path / "other"


def test_probe_finds_an_installed_checkout(tmp_path: Path) -> None:
    site = tmp_path / "env" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    EnvBuilder().create(tmp_path / "env")
    record = site / "megatron_cc-0.1.0.dist-info"
    python = str(tmp_path / "env" / "bin" / "python")
    assert (none := probe(python)) is not None
    assert none.origin is None
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-cc\nVersion: 0.1.0\n")
    (record / "direct_url.json").write_text(origin := _origin(tmp_path / "checkout"))
    assert (found := probe(python)) is not None
    assert found.origin == origin


def test_oracles_are_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(prefix=str(tmp_path), executable=str(tmp_path / "bin" / "python"))
    fetched: list[str] = []

    def fail(python: Interpreter, arguments: list[str], failure: str) -> None:
        raise SetupError(f"{failure}: no network")

    def succeed(python: Interpreter, arguments: list[str], failure: str) -> None:
        fetched.append(arguments[-1])
        Path(arguments[-2]).mkdir(parents=True)

    for variable in setup_env.ORACLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(setup_env, "pip_install", fail)
    setup_env.install_oracles(python)
    assert capsys.readouterr().err.count("will be skipped") == len(setup_env.ORACLES)
    assert not set(setup_env.ORACLES.values()) & set(setup_env.environment(python))
    monkeypatch.setattr(setup_env, "pip_install", succeed)
    setup_env.install_oracles(python)
    setup_env.install_oracles(python)  # they exist: nothing to fetch
    assert fetched == list(setup_env.ORACLES)
    environment = setup_env.environment(python)
    assert Path(environment["MEGATRON_CORE_ORACLE"]).is_dir()
    assert environment["MEGATRON_CORE_ORACLE"] != environment["TRANSFORMERS_ORACLE"]


def test_errors_are_one_line_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / "setup_env.py"), "--", "-c", "pass"],
        env={**os.environ, "PYTHON": "/no/such/python"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "[setup] error: PYTHON=/no/such/python is not a Python of at least 3.10\n"


def test_the_declared_ranges_agree() -> None:
    text = (REPO / "pyproject.toml").read_text()
    assert text.count(f'"{setup_env.torch_requirement()}"') == 2
    assert sysconfig.get_python_version() in {f"3.{minor}" for minor in range(10, 15)}

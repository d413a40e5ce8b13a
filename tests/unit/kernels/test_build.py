"""Installing with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import Distribution, Extension
from torch.utils.cpp_extension import BuildExtension

import setup

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the build reads."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tmp_path / name)
    shutil.copytree(REPO / "megatron" / "kernels" / "csrc", tmp_path / "megatron" / "kernels" / "csrc")
    return tmp_path


def _build(project: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    missing = {"CXX": "no-such-compiler", "CC": "no-such-compiler", "MEGATRON_CC_BUILD": ""}
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env={**os.environ, **missing, **env})


def _without_code(project: Path) -> None:
    """A source of nothing, which takes no time."""
    (csrc := project / "megatron" / "kernels" / "csrc").rename(project / "all")
    (csrc / "cpu").mkdir(parents=True)
    (csrc / "binding.cpp").write_text("int nothing() { return 0; }\n")


def test_what_compiles_is_put_in_its_place(project: Path) -> None:
    _without_code(project)
    done = _build(project, CXX="g++", CC="gcc", MEGATRON_CC_BUILD="require")
    assert done.returncode == 0, done.stderr
    assert len(list((project / "megatron" / "kernels").glob("_native*.so"))) == 1


def test_without_a_compiler_the_installation_goes_on_and_says_so(project: Path) -> None:
    done = _build(project)
    assert done.returncode == 0, done.stderr
    assert "kernels were not compiled" in done.stdout + done.stderr
    assert list(project.rglob("_native*.so")) == []


def test_required_kernels_stop_it(project: Path) -> None:
    assert _build(project, MEGATRON_CC_BUILD="require").returncode != 0


@pytest.mark.parametrize("required", ["", "require"])
def test_a_link_that_fails_is_as_a_compiler_that_does(project: Path, required: str) -> None:
    """Also the last step: an environment without CUDA's libraries, for example."""
    tools = {"CXX": "g++", "CC": "gcc", "LDFLAGS": "-lno-such-library", "CFLAGS": "-O0", "MEGATRON_CC_BUILD": required}
    _without_code(project)
    done = _build(project, **tools)
    assert (done.returncode == 0) is (not required), done.stderr
    assert ("kernels were not compiled" in done.stderr) is (not required)
    assert list(project.rglob("_native*.so")) == []


def test_where_cudas_do_not_compile_those_for_cpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run(self: BuildExtension) -> None:
        (extension,) = self.extensions
        assert not extension._needs_stub  # as setuptools asks of all that it knows
        assert self.compiler is None  # or new_compiler would not know it
        assert self.inplace
        self.compiler, self.inplace = object(), False
        tried.append(*extension.sources)
        if tried[-1] == "cuda":
            raise RuntimeError("nvcc fatal: Unsupported gpu architecture")

    monkeypatch.setattr(BuildExtension, "run", run)
    monkeypatch.setattr(setup, "extension", lambda cuda: Extension("kernels", ["cuda" if cuda else "cpu"]))
    monkeypatch.delenv("MEGATRON_CC_BUILD", raising=False)
    command = setup.builder(cuda=True)(Distribution({"ext_modules": [setup.extension(cuda=True)]}))
    command.inplace = True
    command.finalize_options()
    command.run()
    assert tried == ["cuda", "cpu"]
    monkeypatch.setenv("MEGATRON_CC_BUILD", "require")
    command = setup.builder(cuda=True)(Distribution({"ext_modules": [setup.extension(cuda=True)]}))
    command.inplace = True
    command.finalize_options()
    with pytest.raises(RuntimeError, match="Unsupported gpu architecture"):
        command.run()


def test_they_can_be_left_out(project: Path) -> None:
    done = _build(project, MEGATRON_CC_BUILD="skip")
    assert done.returncode == 0, done.stderr
    assert "kernels" not in done.stderr

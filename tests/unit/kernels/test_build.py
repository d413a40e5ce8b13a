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

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that the build reads."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tmp_path / name)
    shutil.copytree(REPO / "megatron" / "kernels" / "csrc", tmp_path / "megatron" / "kernels" / "csrc")
    return tmp_path


def _build(project: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    missing = {"CXX": "no-such-compiler", "CC": "no-such-compiler", "MEGATRON_CC_BUILD": ""}
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env={**os.environ, **missing, **env})


def _without_code(project: Path) -> None:
    """Replace the sources with a trivial file."""
    (csrc := project / "megatron" / "kernels" / "csrc").rename(project / "all")
    (csrc / "cpu").mkdir(parents=True)
    (csrc / "binding.cpp").write_text("int nothing() { return 0; }\n")


def test_a_compiled_extension_is_put_into_the_package(project: Path) -> None:
    _without_code(project)
    done = _build(project, CXX="g++", CC="gcc", MEGATRON_CC_BUILD="require")
    assert done.returncode == 0, done.stderr
    assert len(list((project / "megatron" / "kernels").glob("_native*.so"))) == 1


def test_a_missing_compiler_is_a_warning(project: Path) -> None:
    done = _build(project)
    assert done.returncode == 0, done.stderr
    assert "kernels were not compiled" in done.stdout + done.stderr
    assert list(project.rglob("_native*.so")) == []


def test_a_missing_compiler_is_an_error_if_kernels_are_required(project: Path) -> None:
    assert _build(project, MEGATRON_CC_BUILD="require").returncode != 0


@pytest.mark.parametrize("required", ["", "require"])
def test_a_failed_link_is_treated_like_a_failed_compilation(project: Path, required: str) -> None:
    """For example, without CUDA's libraries."""
    tools = {"CXX": "g++", "CC": "gcc", "LDFLAGS": "-lno-such-library", "CFLAGS": "-O0", "MEGATRON_CC_BUILD": required}
    _without_code(project)
    done = _build(project, **tools)
    assert (done.returncode == 0) is (not required), done.stderr
    assert ("kernels were not compiled" in done.stderr) is (not required)
    assert list(project.rglob("_native*.so")) == []


def test_without_working_cuda_kernels_those_for_cpus_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run(self: BuildExtension) -> None:
        (extension,) = self.extensions
        assert not extension._needs_stub  # setuptools checks this
        assert self.compiler is None  # new_compiler needs None
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


def test_kernels_can_be_skipped(project: Path) -> None:
    done = _build(project, MEGATRON_CC_BUILD="skip")
    assert done.returncode == 0, done.stderr
    assert "kernels" not in done.stderr

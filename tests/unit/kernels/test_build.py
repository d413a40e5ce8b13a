"""Installing with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_without_a_compiler_the_installation_goes_on_and_says_so(project: Path) -> None:
    done = _build(project)
    assert done.returncode == 0, done.stderr
    assert "kernels were not compiled" in done.stdout + done.stderr
    assert list(project.rglob("_native*.so")) == []


def test_required_kernels_stop_it(project: Path) -> None:
    assert _build(project, MEGATRON_CC_BUILD="require").returncode != 0


def test_they_can_be_left_out(project: Path) -> None:
    done = _build(project, MEGATRON_CC_BUILD="skip")
    assert done.returncode == 0, done.stderr
    assert "kernels" not in done.stderr

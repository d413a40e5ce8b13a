"""The house's rules: imports go downwards, importing does nothing, files stay readable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_layers import LAYERS, MAX_FILE_LINES, MAX_FUNCTION_LINES, check_file, check_repository
from tools.lint import SOURCES

REPO = Path(__file__).resolve().parents[2]

LATE_IMPORTS = ("apex", "matplotlib", "nltk", "sentencepiece", "tensorboard", "transformers")
"""Imported by the functions that use them: they are slow, or not everywhere."""

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import torch
import megatron

state = torch.get_rng_state()
threads = torch.get_num_threads()
dtype = torch.get_default_dtype()
names = [m.name for m in pkgutil.walk_packages(megatron.__path__, "megatron.")]
operators, subclass_of_library = "megatron.kernels._native", "megatron.evaluation.lm_eval_adapter"
names = [name for name in names if name not in (operators, subclass_of_library)]
for name in names:
    importlib.import_module(name)
print(json.dumps({
    "count": len(names),
    "late": [name for name in sys.argv[1:] if name in sys.modules],
    "unchanged": [
        torch.equal(torch.get_rng_state(), state),
        torch.get_num_threads() == threads,
        torch.get_default_dtype() == dtype,
        not torch.distributed.is_initialized(),
    ],
}))
"""


def test_every_package_has_a_layer() -> None:
    packages = {f"megatron.{path.parent.name}" for path in (REPO / "megatron").glob("*/__init__.py")}
    assert packages | {Path(name).stem for name in SOURCES} <= {"megatron", *LAYERS}


def test_the_sources_keep_the_rules() -> None:
    assert check_repository(REPO) == []


def test_importing_everything_does_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:megatron", "-c", IMPORT_EVERYTHING, *LATE_IMPORTS],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "importing printed something"
    report = json.loads(lines[0])
    assert report["count"] > 10
    assert report["late"] == []
    assert report["unchanged"] == [True] * 4


@pytest.mark.parametrize(
    ("package", "source", "problem"),
    [
        ("comm", "import megatron.parallel", "must not import megatron.parallel"),
        ("comm", "from megatron import parallel", "must not import megatron.parallel"),
        ("comm", "from megatron.parallel.tensor import linear", "layer 4"),
        ("comm", "def f():\n    from megatron.model import gpt", "layer 5"),
        ("comm", "if TYPE_CHECKING:\n    import megatron.training.step", "layer 7"),
        ("comm", "from ..parallel import data", "layer 4"),
        ("comm", "from .. import parallel", "layer 4"),
        ("comm", "from ... import parallel", "leaves the package"),
        ("model", "from megatron.data import batch", "only lower layers"),
        ("compression", "import torch.distributed as dist", "must not import torch.distributed"),
        ("compression", "from torch import distributed", "must not import torch.distributed"),
        ("compression", "from torch.distributed.device_mesh import DeviceMesh", "must not import"),
        ("compression", "import torch\ntorch.distributed.barrier()", "must not use torch.distributed"),
        ("novelty", "import os", "has no layer"),
        ("comm", "def f(:", "invalid syntax"),
    ],
)
def test_the_checker_finds(tmp_path: Path, package: str, source: str, problem: str) -> None:
    path = tmp_path / "megatron" / package / "points.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    problems = check_file(path, tmp_path)
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].startswith(f"megatron/{package}/points.py:")


@pytest.mark.parametrize(
    ("where", "source", "problem"),
    [
        ("megatron/comm/points.py", "from tools import launch", "must not import tools.launch (layer 11)"),
        ("megatron/evaluation/points.py", "import benchmarks.train", "only lower layers"),
        ("benchmarks/gpu/points.py", "from tools.quickstart import run", "benchmarks (layer 10) must not import"),
        ("benchmarks/points.py", "import ASPLOS23.report", "only lower layers"),
        ("tools/points.py", "from tests.support import cli", "must not import tests.support.cli"),
        ("points.py", "import os", "points has no layer"),
        ("pretrain_gpt.py", "import tools.launch", "only lower layers"),
        ("megatron/__init__.py", "from megatron.config import run", "imports none of its packages"),
    ],
)
def test_the_checker_finds_what_commands_and_benchmarks_must_not_use(
    tmp_path: Path, where: str, source: str, problem: str
) -> None:
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert [problem in found for found in check_repository(tmp_path)] == [True]


def test_the_checker_allows_commands_to_use_what_is_below(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "points.py").write_text("import benchmarks.lab.command\nfrom megatron.planner import command")
    (tmp_path / "val_check_gpt.py").write_text("from megatron.evaluation.sweep_command import main")
    assert check_repository(tmp_path) == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("comm", "from megatron.topology import group\nfrom megatron.compression.api import Codec"),
        ("comm", "from megatron.comm import ledger\nfrom . import ledger\nfrom .ledger import Ledger"),
        ("comm", "import torch.distributed as dist"),
        ("model", "from megatron.parallel.tensor import linear"),
        ("inference", "from megatron.checkpoint import load"),
        ("comm", "import megatronics.parallel"),
    ],
)
def test_the_checker_allows(tmp_path: Path, package: str, source: str) -> None:
    path = tmp_path / "megatron" / package / "points.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert check_file(path, tmp_path) == []


def test_the_checker_finds_what_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "megatron" / "comm" / "points.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES)
    assert [problem.split(": ")[1] for problem in check_file(path, tmp_path)] == [
        f"f has {MAX_FUNCTION_LINES + 1} lines, more than {MAX_FUNCTION_LINES}"
    ]
    path.write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert "split the file" in check_file(path, tmp_path)[0]

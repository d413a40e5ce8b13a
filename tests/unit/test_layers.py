"""The checks of `make lint` find what breaks the house's rules; and importing does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_sources import MAX_FILE_LINES, MAX_FUNCTION_LINES, check_file, check_repository
from tools.check_words import check_words
from tools.lint import IMPORTS

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
operators = "megatron.kernels._native"
subclasses_of_lm_eval = ("megatron.evaluation.lm_eval_adapter", "megatron.evaluation.lm_eval_rules")
names = [name for name in names if name not in (operators, *subclasses_of_lm_eval)]
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


def _lint(*arguments: str, folder: Path) -> str:
    """A check's output about a folder; empty when the check passes."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An empty project with this project's packages and rules."""
    for path in REPO.glob("megatron/*/__init__.py"):
        (tmp_path / "megatron" / path.parent.name).mkdir(parents=True)
        (tmp_path / "megatron" / path.parent.name / "__init__.py").touch()
    for name in ("megatron", "benchmarks", "tools", "ASPLOS23", "tests"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    return tmp_path


def _write(tree: Path, relative: str, source: str) -> None:
    path = tree / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(source)


UPWARDS = [
    ("distributed", "import megatron.parallel", "megatron.parallel"),
    ("distributed", "from megatron import training", "megatron.training"),
    ("distributed", "def f():\n    from megatron.models import gpt", "megatron.models"),
    ("distributed", "if TYPE_CHECKING:\n    import megatron.inference", "megatron.inference"),
    ("distributed", "from ..checkpoint import save", "megatron.checkpoint"),
    ("distributed", "from .. import planner", "megatron.planner"),
    ("models", "from megatron.data import batch", "megatron.data"),
    ("base", "from megatron.kernels import ops", "megatron.kernels"),
    ("base", "from torch import Tensor", "torch"),
    ("evaluation", "import benchmarks.train", "benchmarks"),
    ("compression", "from tools import launch", "tools"),
    ("data", "from tests import support", "tests"),
    ("training", "import ASPLOS23", "ASPLOS23"),
]


def test_every_upward_import_is_reported(tree: Path) -> None:
    assert _lint(*IMPORTS, folder=tree) == "", "without them there is nothing to find"
    for number, (package, source, _) in enumerate(UPWARDS):
        _write(tree, f"megatron/{package}/module_{number}.py", source)
    _write(tree, "benchmarks/gpu/points.py", "from tools import launch")
    _write(tree, "benchmarks/points.py", "import ASPLOS23")
    _write(tree, "megatron/__init__.py", "from megatron.config import run")
    output = " ".join(_lint(*IMPORTS, folder=tree).split())
    for number, (package, _, imported) in enumerate(UPWARDS):
        assert f"megatron.{package}.module_{number} -> {imported} (l." in output, UPWARDS[number]
    assert "benchmarks.gpu.points -> tools (l.1)" in output
    assert "benchmarks.points -> ASPLOS23 (l.1)" in output
    assert "megatron -> megatron.config (l.1)" in output


def test_a_package_without_a_layer_is_reported(tree: Path) -> None:
    _write(tree, "megatron/novelty/points.py", "import os")
    assert "novelty" in _lint(*IMPORTS, folder=tree)


def test_downward_imports_are_allowed(tree: Path) -> None:
    _write(tree, "megatron/distributed/group.py", "")
    _write(tree, "megatron/parallel/reducer.py", "import torch.distributed\nfrom megatron.distributed import group")
    _write(tree, "megatron/parallel/points.py", "from . import reducer\nimport megatronics.parallel")
    _write(tree, "tools/points.py", "import benchmarks\nfrom megatron.planner import command")
    assert _lint(*IMPORTS, folder=tree) == ""


CYCLES = {
    "parallel": [
        "from megatron.parallel.first0 import f",
        "import megatron.parallel.first1",
        "from .first2 import f",
    ],
    "models": [
        "from . import first0",
        "def g():\n    from megatron.models.first1 import f",
        "if TYPE_CHECKING:\n    from megatron.models import first2",
    ],
}


def test_import_cycles_are_reported_wherever_they_are(tree: Path) -> None:
    for package, sources in CYCLES.items():
        for number, source in enumerate(sources):
            _write(tree, f"megatron/{package}/first{number}.py", f"from megatron.{package}.second{number} import g")
            _write(tree, f"megatron/{package}/second{number}.py", source)
    output = _lint(*IMPORTS, "--contract", "circles", folder=tree)
    for package in CYCLES:
        report = output.partition(f"megatron.{package}")[2]
        assert all(f".second{number} -> .first{number}" in report.split("megatron.")[0] for number in range(3)), package


def test_communicating_algorithms_are_reported(tree: Path) -> None:
    sources = [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch\ntorch.distributed.barrier()",
    ]
    for package in ("kernels", "compression", "parallel"):
        for number, source in enumerate(sources):
            _write(tree, f"megatron/{package}/points{number}.py", source)
    output = _lint("-m", "ruff", "check", "--select", "TID251", "--no-cache", ".", folder=tree)
    assert "kernels and compressors never communicate" in output
    for package in ("kernels", "compression"):
        for number, source in enumerate(sources):
            assert f"megatron/{package}/points{number}.py:" in output, (package, source)
    assert "megatron/parallel" not in output


@pytest.mark.slow
def test_importing_every_module_has_no_effect() -> None:
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


def test_long_files_and_functions_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "megatron" / "comm" / "points.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES)
    assert [problem.split(": ")[1] for problem in check_file(path, tmp_path, {})] == [
        f"f has {MAX_FUNCTION_LINES + 1} lines, more than {MAX_FUNCTION_LINES}"
    ]
    path.write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert "split the file" in check_file(path, tmp_path, {})[0]
    path.write_text("def f(:")
    assert "invalid syntax" in check_repository(tmp_path)[0]


def test_vague_words_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "megatron" / "points.py"
    path.parent.mkdir()
    path.write_text("""def f(own):\n    \"\"\"What is sent.\"\"\"\n    rest = [one for one in own]  # what is left\n""")
    names, violations = check_words(path.parent)
    assert names == "megatron: 1000.0 vague names per 1,000 lines, more than 1; most in megatron/points.py (3)"
    assert violations.endswith('"what" per 10,000 words, more than 5; most in megatron/points.py (2)')
    path.write_text("""def f(rows):\n    \"\"\"Message of rows.\"\"\"\n    return [row for row in rows]  # all\n""")
    assert check_words(path.parent) == []


def test_public_classes_have_unique_names(tmp_path: Path) -> None:
    for name, code in (("a", "class Part: ...\nclass _Own: ..."), ("b", "class _Own: ...\n\nclass Part: ...")):
        (tmp_path / "megatron" / name).mkdir(parents=True)
        (tmp_path / "megatron" / name / "x.py").write_text(code)
    assert check_repository(tmp_path) == [
        "megatron/b/x.py:3: class Part has the name of a class in megatron/a/x.py: rename it"
    ]


def test_flags_are_read_without_torch() -> None:
    """Every launcher and every --help would wait for it."""
    code = (
        "import sys; from megatron.config.flags import parse_args; "
        "parse_args(['--lr', '1']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")

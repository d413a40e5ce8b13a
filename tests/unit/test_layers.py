"""The house's rules: imports go downwards, importing does nothing, files stay readable."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tools.check_layers import (
    LAYERS,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    check_file,
    check_repository,
    imported_modules,
)
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


@pytest.mark.slow
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
        ("comm", "from megatron.parallel.tensor import linear", "layer 5"),
        ("comm", "def f():\n    from megatron.model import gpt", "layer 6"),
        ("comm", "if TYPE_CHECKING:\n    import megatron.training.step", "layer 8"),
        ("comm", "from ..parallel import data", "layer 5"),
        ("comm", "from .. import parallel", "layer 5"),
        ("comm", "from ... import parallel", "leaves the package"),
        ("model", "from megatron.data import batch", "only lower layers"),
        ("base", "from torch import Tensor", "must not import torch"),
        ("base", "from megatron.kernels import ops", "layer 1"),
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
        ("megatron/comm/points.py", "from tools import launch", "must not import tools.launch (layer 12)"),
        ("megatron/evaluation/points.py", "import benchmarks.train", "only lower layers"),
        ("benchmarks/gpu/points.py", "from tools.quickstart import run", "benchmarks (layer 11) must not import"),
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


def _sources(root: Path) -> dict[str, str]:
    """The text of every module below a folder, by dotted name; of a package that of its __init__.py."""
    found = {}
    for path in sorted((root / "megatron").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def _circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, wherever in the files the imports stand; none when there is none."""
    graph: dict[str, set[str]] = {}
    for module, text in sources.items():
        is_package = any(other.startswith(f"{module}.") for other in sources)
        graph[module] = set()
        for _, name in imported_modules(ast.parse(text), module, is_package):
            known = name if name in sources else name.rpartition(".")[0]
            if known in sources and known != module:
                graph[module].add(known)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = _sources(REPO)
    assert len(sources) > 150
    assert _circle(sources) == []


@pytest.mark.parametrize(
    "back",
    [
        "from megatron.a.one import f",
        "import megatron.a.one",
        "from .one import f",
        "from . import one",
        "def g():\n    from megatron.a.one import f",
        "if TYPE_CHECKING:\n    from megatron.a import one",
    ],
)
def test_a_circle_is_found_wherever_the_import_stands(back: str) -> None:
    sources = {"megatron.a": "", "megatron.a.one": "from megatron.a.two import g", "megatron.a.two": back}
    assert set(_circle(sources)) == {"megatron.a.one", "megatron.a.two"}
    assert _circle({**sources, "megatron.a.two": "from megatron.a import three"}) == []


def test_flags_are_read_without_torch() -> None:
    """Every launcher and every --help would wait for it."""
    code = (
        "import sys; from megatron.config import parse_args; parse_args(['--lr', '1']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")

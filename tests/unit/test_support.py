"""The parts of the test support that need no second process."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from tests.support.cli import CliResult
from tests.support.combinations import mark_repeats
from tests.support.spawn import rendezvous_env

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

MARKED_TESTS = """
import pytest

@pytest.mark.faults
def test_long():
    pass

def test_short():
    pass
"""


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
    assert "OMP_NUM_THREADS" in os.environ  # of the processes that tests start


def test_check_shows_both_streams_of_a_failure() -> None:
    good = CliResult(0, "a", "b")
    assert good.check() is good
    with pytest.raises(AssertionError, match=r"exit code -9[\s\S]*out of it[\s\S]*wrong"):
        CliResult(-9, "out of it", "wrong").check()


def test_rendezvous_names_the_launchers_store() -> None:
    env = rendezvous_env(4, 12345)
    assert env["WORLD_SIZE"] == "4"
    assert env["MASTER_PORT"] == "12345"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize(("arguments", "passed"), [([], 1), (["--faults"], 2)])
def test_fault_tests_run_only_on_request(pytester: pytest.Pytester, arguments: list[str], passed: int) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = faults")
    pytester.makepyfile(MARKED_TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, skipped=2 - passed)


REPEATS = """
import pytest
from tests.support.combinations import mark_repeats

@pytest.mark.parametrize("name", mark_repeats(["a", "b", "c"], keep=["b"]))
def test_names(name):
    assert name == "b"

CASES = [pytest.param(1, 2, id="small"), pytest.param(3, 4, id="large")]

@pytest.mark.parametrize(("x", "y"), mark_repeats(CASES, keep=["large"]))
def test_ids(x, y):
    assert x == 3

@pytest.mark.parametrize(("x", "y"), mark_repeats([(1, [2]), (3, [4])], keep=[(3, [4])]))
def test_pairs(x, y):
    assert x == 3
"""


@pytest.mark.parametrize(("arguments", "passed", "failed"), [([], 3, 0), (["--repeats"], 3, 4)])
def test_repeats_run_only_on_request(pytester: pytest.Pytester, arguments: list[str], passed: int, failed: int) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = repeats")
    pytester.makepyfile(REPEATS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, failed=failed, deselected=4 - failed)


def test_a_case_to_keep_must_exist() -> None:
    with pytest.raises(AssertionError, match="no such cases: \\['d'\\]"):
        mark_repeats(["a", "b"], keep=["a", "d"])


def test_ci_runs_the_repeats() -> None:
    commands = (CONFTEST.parents[1] / ".ci" / "run").read_text()
    assert "step make test\n" in commands
    assert "step make test-repeats\n" in commands


def test_unit_runs_neither_slow_tests_nor_imports_of_ranks(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = slow\ntestpaths = unit multiprocess")
    for folder in ("unit", "multiprocess"):
        pytester.mkdir(folder)
    slow = "import pytest\n\n@pytest.mark.slow\ndef test_search():\n    pass\n\ndef test_short():\n    pass\n"
    (pytester.path / "unit" / "test_a.py").write_text(slow)
    (pytester.path / "multiprocess" / "test_b.py").write_text("raise ImportError\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--import-mode=importlib", "--unit")
    result.assert_outcomes(passed=1, deselected=1)


def test_unit_tests_start_no_ranks() -> None:
    """They may use helpers that read a command's result or name a port, but none that starts a command."""
    starting = {"run_ranks", "run_cli", "launch_ranks_cli", "RankProcesses", "Forked", "warm_python", "train"}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests.support"):
                assert not starting & {alias.name for alias in node.names}, path

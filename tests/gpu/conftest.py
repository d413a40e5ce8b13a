"""Several ranks share the GPU over NCCL (or, to try the tests themselves, a CPU over gloo: --device cpu)."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device import VARIABLE

ORDER = (
    *("kernels", "experts_cuda", "fp8_cuda", "training_cuda", "determinism_cuda", "generation_cuda"),
    *("ranks_layouts", "ranks_compressors", "ranks_runs", "ranks_islands", "meters_cuda"),
)
"""Files by what they are worth when time runs out; what must not run beside others comes last."""
PLACES = {f"test_{name}.py": place for place, name in enumerate(ORDER)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES[item.path.name] if item.path.parent.name == "gpu" else -1)


@pytest.fixture(autouse=True)
def shared_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a test of several starts are on the device that was asked for."""
    if request.node.get_closest_marker("ranks"):
        monkeypatch.setenv(VARIABLE, request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def one_test_or_many(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that compares times waits until no other worker's test is on the GPU, and lets none begin."""
    alone = request.node.get_closest_marker("alone") is not None
    with (Path(tempfile.gettempdir()) / f"megatron-gpu-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
        fcntl.flock(file, fcntl.LOCK_UN)  # a child may have inherited the file

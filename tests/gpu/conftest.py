"""Several ranks share the GPU over NCCL (or, to try the tests themselves, a CPU over gloo: --device cpu)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.device import VARIABLE
from tests.support.one_gpu import turn_on_the_gpu

ORDER = (
    *("kernels", "experts_cuda", "fp8_cuda", "training_cuda", "determinism_cuda", "generation_cuda"),
    *("ranks_layouts", "ranks_compressors", "ranks_runs", "ranks_islands", "meters_cuda"),
)
"""Files in order of importance, for when time runs out; files that must not run beside others come last."""
PLACES = {f"test_{name}.py": position for position, name in enumerate(ORDER)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path.name, 0) if item.path.parent.name == "gpu" else -1)


@pytest.fixture(autouse=True)
def shared_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a test of several starts are on the device that was asked for."""
    if request.node.get_closest_marker("ranks"):
        monkeypatch.setenv(VARIABLE, request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def one_test_or_many(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers' tests share the GPU, but for those that compare times."""
    with turn_on_the_gpu(request.node.get_closest_marker("alone") is not None):
        yield

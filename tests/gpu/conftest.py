"""Several ranks share the GPU over NCCL (or, to try the tests themselves, a CPU over gloo: --device cpu)."""

from __future__ import annotations

import pytest

from tests.support.device import VARIABLE


@pytest.fixture(autouse=True)
def shared_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a test of several starts are on the device that was asked for."""
    if request.node.get_closest_marker("ranks"):
        monkeypatch.setenv(VARIABLE, request.config.getoption("--device"))

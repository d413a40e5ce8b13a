"""Settings that every test shares: one thread, fixed examples in CI, GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the processes started
# torch's store looks up the name of each address it connects to, "::ffff:127.0.0.1" among them, which no hosts file
# has. A name server that leaves a question in fifty unanswered would cost those ranks five seconds. So no
# name server is asked, and torch does not say that it cannot tell the names.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Where layers are compiled, a rank would start as many compilers as there are processors.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import combinations

torch.set_num_threads(1)

if hasattr(os, "SCHED_BATCH"):
    # Inherited by all processes started. A thread of gloo that wakes up while another holds its lock polls until
    # it has it. Where ranks share processors, it would keep the other from going on: woken up, it comes first.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


BESIDE = frozenset(
    f"test_{name}.py"
    for name in (
        *("asplos23", "auto_compression", "bench_gpu", "bench_memory", "bench_network", "damaged_files"),
        *("evaluate_lm", "faults", "finetune_example", "generation_server", "gradient_records", "island_ends"),
        *("island_faults", "island_outliers", "island_rounds", "islands", "jube", "lsf", "netlab", "slurm"),
        *("sockets", "trace"),
    )
)
"""Files of tests/multiprocess that mostly wait, for processes to start or for limits to pass."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit", action="store_true", help="only what needs no ranks and is not marked slow: two minutes")
    parser.addoption("--faults", action="store_true", help="run the long fault-injection tests too")
    parser.addoption(
        "--repeats", action="store_true", help="run the tests marked repeats too: further layouts, models, compressors"
    )
    parser.addoption(
        "--all-combinations", action="store_true", help="full products of parameters where the tests take pairs"
    )
    parser.addoption(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="of the ranks of tests/gpu; cpu tries the tests themselves, over gloo",
    )


def pytest_collection_finish() -> None:
    """Imported modules and collected tests are no garbage: collections in tests, of seconds each, pass them over."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    combinations.all_combinations = config.getoption("--all-combinations")


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Programs that a module's tests, scripts and launchers start with ``sys.executable`` are forks of a process that
    has torch imported (``tests.support.warm``)."""
    from tests.support.warm import warm_python

    with warm_python() as python, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python)
        patch.setenv("PYTHON_EXEC", python)  # torchrun's, for its ranks
        yield


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny data set."""
    from tests.support.corpus import write_documents

    return write_documents(tmp_path_factory.mktemp("data") / "tiny")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist a worker runs the tests that keep several processes busy, another those that wait for processes
    (``BESIDE``), and free workers the rest, by files; tests on a GPU are single units."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            *folders, file = nodeid.partition("::")[0].split("/")
            if "gpu" in folders:
                return nodeid
            if "multiprocess" not in folders:
                return "/".join([*folders, file])
            return "beside" if file in BESIDE else "multiprocess"

    return Scheduler(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--unit`` tests of ranks are not even imported."""
    return True if config.getoption("--unit") and "multiprocess" in collection_path.parent.parts else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that this machine or this call cannot run, with the reason. The longest tests come first."""
    markers = {"slow"} if config.getoption("--unit") else set()
    markers |= set() if config.getoption("--repeats") else {"repeats"}
    selected = [item for item in items if not any(item.get_closest_marker(name) for name in markers)]
    selected_items = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in selected_items])
    items[:] = selected
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: ("multiprocess" not in item.path.parts, item.path.name in BESIDE, item.path not in slow)
    )
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_faults = pytest.mark.skip(reason="long fault injection: run `make test-faults`")
    for item in items:
        elsewhere = item.get_closest_marker("ranks") and config.getoption("--device") == "cpu"
        if item.get_closest_marker("gpu") and not elsewhere and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("faults") and not config.getoption("--faults"):
            item.add_marker(no_faults)
